"""One pass of images through a network, with an ear at every site."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from leanconv.calibrate.batches import Batch, Batches, out_of_memory
from leanconv.calibrate.positions import Chosen, Positions
from leanconv.calibrate.prefetch import Inputs
from leanconv.calibrate.probes import Probe, Responses
from leanconv.calibrate.streaming.tape import Recorder, taping
from leanconv.calibrate.streaming.tape_cache import Tapes
from leanconv.errors import LeanconvError
from leanconv.network.function_trace import tensors
from leanconv.network.recognise import is_addition
from leanconv.network.sites import Site
from leanconv.network.user_model import model_failed

Take = Callable[[str, int, Responses], None]  # layer, number of the first image, what was found


@dataclass(frozen=True)
class Seen:
    """What a site receives: its layer's inputs, one a call, and what is added to the response, whole."""

    inputs: tuple[Tensor, ...]
    addend: Tensor | None


class _Reached(BaseException):
    """The last probe has what it wants; the rest of the network need not run. No Exception: a network's own
    ``except Exception`` must not catch it."""


@dataclass
class _Watch:
    """A probe, and what it has seen of the batch that is running: whole inputs and responses, one a call; the
    positions, the tail's output there, and the sum as far as it has come."""

    probe: Probe
    inputs: list[Tensor] = field(default_factory=list)
    responses: list[Tensor] = field(default_factory=list)
    chosen: Chosen | None = None
    addend: Tensor | None = None
    output: Tensor | None = None
    running_sum: Tensor | None = None
    adds: int = 0
    calls: int = 0

    def clear(self) -> None:
        self.inputs, self.responses = [], []
        self.chosen = self.addend = self.output = self.running_sum = None
        self.calls = 0


def observe(
    model: nn.Module,
    batches: Batches,
    probes: Sequence[Probe],
    *,
    positions: Positions | None,
    device: torch.device,
    take: Take,
    step: Callable[[], None] = lambda: None,
    whole: dict[str, Seen] | None = None,
    tapes: Tapes | None = None,
    inputs: Inputs | None = None,
    walk: Callable[[Batch], Iterable[tuple[str, Responses]] | None] = lambda batch: None,
) -> None:
    """Hand the responses of every probe to ``take``, batch by batch.

    Hooks take a layer's *input* and compute the response from it, so operations in place behind the layer cannot
    spoil what was captured. Addends are the sum that reaches the activation less the layer's own output. The run of
    each batch stops after the last probe. Without ``positions`` nothing is looked at; with ``whole`` that receives
    all a site sees. ``tapes`` receives a tape for every kind of batch; ``inputs`` may have the images on the device
    already; ``walk`` may know the responses of a batch without all this.
    """
    watches = [_Watch(probe) for probe in probes]
    sites = [probe.site for probe in probes]

    def work(batch: Batch) -> None:
        known = walk(batch)
        if known is not None:
            for name, found in known:
                take(name, batch.first, found)
            step()
            return
        given = batch.on(device) if inputs is None else inputs.get(batch)
        recorded = tapes is not None and tapes.get(batch) is None
        with (
            _watched(model, watches, positions, whole is not None) as run,
            taping(model, sites) if recorded else nullcontext() as recorder,
        ):
            if recorder is not None:
                recorder.given(given, batch.size)
            run.start(batch, recorder)
            try:
                model(given)
            except _Reached:
                pass
            except LeanconvError:
                raise
            except Exception as error:
                if out_of_memory(error):
                    raise
                raise model_failed(error, batch.pieces[0]) from error
        for watch in watches:
            if positions is not None:
                take(watch.probe.site.name, batch.first, _seen(watch))
            if whole is not None and watch.inputs:
                whole[watch.probe.site.name] = Seen(tuple(watch.inputs), watch.addend)
            watch.clear()
        if tapes is not None and recorder is not None:
            tapes.add(batch, recorder.tape)
        step()

    with torch.no_grad():
        for batch in batches:
            work(batch)


def _seen(watch: _Watch) -> Responses:
    site = watch.probe.site
    if not watch.responses or (site.adds and watch.addend is None):
        raise LeanconvError(
            f"layer {site.name!r} ran on the first image but not on others: what this network runs depends on the "
            "data; name that layer in skip."
        )
    return Responses(torch.cat(watch.responses) if site.calls > 1 else watch.responses[0], watch.addend)


class _Run(TorchFunctionMode):
    """Follows one pass: inputs of layers through hooks, sums through the functions the network calls."""

    def __init__(self, watches: list[_Watch], positions: Positions | None, whole: bool):
        super().__init__()
        self._whole = whole
        self._watches = watches
        self._positions = positions
        self._waiting: set[str] = set()
        self._batch: Batch | None = None
        self._recorder: Recorder | None = None

    def start(self, batch: Batch, recorder: Recorder | None) -> None:
        self._batch, self._recorder = batch, recorder
        self._waiting = {watch.probe.site.name for watch in self._watches}
        for watch in self._watches:
            watch.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = [watch for watch in self._watches if watch.running_sum is not None]
        if found:
            operands = list(tensors((args, kwargs)))
            found = [watch for watch in found if any(t is watch.running_sum for t in operands)]
            if found and not is_addition(func, kwargs, operands):
                found = []
        result = func(*args, **kwargs)
        for watch in found:
            self._sum_arrives(watch, result)
        return result

    def input_arrives(self, watch: _Watch, x: Tensor) -> None:
        assert self._batch is not None
        if self._positions is not None:
            with self._unrecorded():
                watch.chosen = chosen_at(watch.probe, x, self._batch, self._positions)
                watch.responses.append(watch.probe.from_input(x, watch.chosen))
        if self._whole:
            with self._unrecorded():
                watch.inputs.append(x.clone())
        watch.calls += 1
        if not watch.probe.site.adds and watch.calls == watch.probe.site.calls:
            self._done(watch.probe.site)

    def tail_arrives(self, watch: _Watch, y: Tensor) -> None:
        """What the shortcut will be added to."""
        if watch.chosen is not None:
            with self._unrecorded():
                watch.output = watch.probe.outputs(y, watch.chosen)
        elif self._whole:
            with self._unrecorded():
                watch.output = y.clone()
        watch.running_sum, watch.adds = y, 0

    def _sum_arrives(self, watch: _Watch, total: Tensor) -> None:
        site = watch.probe.site
        watch.running_sum, watch.adds = total, watch.adds + 1
        if watch.adds < site.adds:
            return
        if self._recorder is not None:
            self._recorder.sum_is(site.name, total)
        if watch.chosen is not None and watch.output is not None:
            with self._unrecorded():
                watch.addend = watch.probe.outputs(total, watch.chosen) - watch.output
        elif self._whole and watch.output is not None:
            with self._unrecorded():
                watch.addend = total - watch.output
        watch.running_sum = None
        self._done(site)

    def _unrecorded(self) -> Any:
        return nullcontext() if self._recorder is None else self._recorder.aside()

    def _done(self, site: Site) -> None:
        self._waiting.discard(site.name)
        if not self._waiting:
            raise _Reached


def chosen_at(probe: Probe, x: Tensor, batch: Batch, positions: Positions) -> Chosen:
    """The positions to look at."""
    images = len(x) == batch.size
    return positions.choose(probe.positions(x), batch.first, len(x), images=images)


@contextmanager
def _watched(model: nn.Module, watches: list[_Watch], positions: Positions | None, whole: bool) -> Iterator[_Run]:
    """Hooks at the probes' layers (or what stands in their place); they come off on any error."""
    run = _Run(watches, positions, whole)
    handles = []
    for watch in watches:
        site = watch.probe.site

        def before(module: nn.Module, args: Any, kwargs: Any, watch: _Watch = watch) -> None:
            run.input_arrives(watch, next(tensors((args, kwargs))))

        def after(module: nn.Module, args: Any, result: Any, watch: _Watch = watch) -> None:
            run.tail_arrives(watch, result)

        layer = model.get_submodule(site.name)
        handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        if site.adds:
            handles.append(model.get_submodule(site.tail).register_forward_hook(after))
    try:
        # Functions are only looked at where a sum is awaited.
        with run if any(watch.probe.site.adds for watch in watches) else nullcontext():
            yield run
    finally:
        for handle in handles:
            handle.remove()
