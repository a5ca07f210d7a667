"""Run images through a network and collect what its sites see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from leanconv.calibrate.batches import Batch, out_of_memory
from leanconv.calibrate.positions import Chosen, Positions
from leanconv.calibrate.prefetch import Inputs
from leanconv.calibrate.probes import Probe, Responses
from leanconv.calibrate.streaming.tape import Recorder, Tapes, taping
from leanconv.errors import LeanconvError
from leanconv.network.function_trace import tensors
from leanconv.network.recognise import is_addition
from leanconv.network.user_model import model_failed

Take = Callable[[str, int, Responses], None]  # layer, index of the first image, its responses


@torch.no_grad()
def observe(
    model: nn.Module,
    batches: Iterable[Batch],
    probes: Sequence[Probe],
    *,
    positions: Positions,
    device: torch.device,
    take: Take,
    step: Callable[[], None] = lambda: None,
    tapes: Tapes | None = None,
    inputs: Inputs | None = None,
) -> None:
    """Give the responses of every probe to ``take``, batch by batch; ``step`` is called after each batch.

    Hooks take a layer's *input* and compute the response from it, so operations in place behind the layer cannot
    change it. Addends are the sum that reaches the activation less the layer's own output. The run of each batch stops
    after the last probe. ``tapes`` receives a tape for every kind of batch; ``inputs`` may have the images on the
    device already.
    """

    def observe_batch(batch: Batch) -> None:
        watches = [_SamplingWatch(probe, batch, positions) for probe in probes]
        _run(model, batch, batch.on(device) if inputs is None else inputs.get(batch), watches, tapes)
        for watch in watches:
            take(watch.site.name, batch.first, watch.responses())
        step()

    for batch in batches:
        observe_batch(batch)


@dataclass(frozen=True)
class Seen:
    """All a site receives: its layer's inputs, one a call, and what is added to the response."""

    inputs: tuple[Tensor, ...]
    addend: Tensor | None


@torch.no_grad()
def see(
    model: nn.Module,
    batch: Batch,
    probes: Sequence[Probe],
    device: torch.device,
    *,
    tapes: Tapes | None = None,
    copy: bool = True,
) -> dict[str, Seen]:
    """What the sites of ``probes`` receive for one batch, if it is to be copied. ``tapes`` receives a tape of it."""
    watches = [_Watch(probe, copy=copy) for probe in probes]
    _run(model, batch, batch.on(device), watches, tapes)
    return {watch.site.name: Seen(tuple(watch.inputs), watch.addend) for watch in watches if watch.inputs}


class _Finished(BaseException):
    """The last probe has what it needs; the rest of the network need not run. No Exception: a network's own
    ``except Exception`` must not catch it."""


class _Watch:
    """Follows a site while a batch runs. With ``copy`` it keeps all the site receives, else nothing."""

    def __init__(self, probe: Probe, *, copy: bool):
        self.probe, self.site, self._copy = probe, probe.site, copy
        self.inputs: list[Tensor] = []  # what is kept of the layer's inputs, one a call
        self.output: Tensor | None = None  # what is kept of the tail's output
        self.running_sum: Tensor | None = None  # that output, and what was added to it so far
        self.addend: Tensor | None = None
        self.adds = self.calls = 0

    def keep_input(self, x: Tensor) -> None:
        if self._copy:
            self.inputs.append(x.clone())

    def part_of(self, y: Tensor) -> Tensor | None:
        """What is to be kept of an output, as a copy."""
        return y.clone() if self._copy else None


class _SamplingWatch(_Watch):
    """Keeps the probe's responses to the inputs, and outputs, at sampled positions."""

    def __init__(self, probe: Probe, batch: Batch, positions: Positions):
        super().__init__(probe, copy=False)
        self._batch, self._positions = batch, positions
        self._chosen: Chosen | None = None

    def keep_input(self, x: Tensor) -> None:
        self._chosen = chosen_at(self.probe, x, self._batch, self._positions)
        self.inputs.append(self.probe.from_input(x, self._chosen))

    def part_of(self, y: Tensor) -> Tensor | None:
        return None if self._chosen is None else self.probe.outputs(y, self._chosen)

    def responses(self) -> Responses:
        if not self.inputs or (self.site.adds and self.addend is None):
            raise LeanconvError(
                f"layer {self.site.name!r} ran on the first image but not on others: what this network runs depends on "
                "the data; name that layer in skip."
            )
        return Responses(torch.cat(self.inputs) if self.site.calls > 1 else self.inputs[0], self.addend)


def chosen_at(probe: Probe, x: Tensor, batch: Batch, positions: Positions) -> Chosen:
    """The positions to look at, for a layer's input ``x``."""
    return positions.choose(probe.positions(x), batch.first, len(x), images=len(x) == batch.size)


def _run(model: nn.Module, batch: Batch, images: Any, watches: Sequence[_Watch], tapes: Tapes | None) -> None:
    """Run ``batch``, which is ``images`` on the device, until every watch has seen its site. ``tapes`` receives a tape
    if it has none for such a batch. Hooks come off on any error."""
    run = _Run(watches)
    with ExitStack() as stack:
        for watch in watches:
            layer, begins = model.get_submodule(watch.site.name), partial(run.layer_begins, watch)
            stack.enter_context(layer.register_forward_pre_hook(begins, with_kwargs=True))
            if watch.site.adds:
                tail = model.get_submodule(watch.site.tail)
                stack.enter_context(tail.register_forward_hook(partial(run.tail_ends, watch)))
        # Functions are only looked at where a sum is awaited.
        if any(watch.site.adds for watch in watches):
            stack.enter_context(run)
        if tapes is not None and tapes.get(batch) is None:
            sites = [watch.site for watch in watches]
            run.recorder = stack.enter_context(taping(model, sites, images, batch.size))
        try:
            model(images)
        except _Finished:
            pass
        except LeanconvError:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            raise model_failed(error, batch.pieces[0]) from error
    if tapes is not None and run.recorder is not None:
        tapes.add(batch, run.recorder.tape)


class _Run(TorchFunctionMode):
    """One pass: inputs of layers come through hooks, sums through the functions the network calls."""

    def __init__(self, watches: Sequence[_Watch]):
        super().__init__()
        self.recorder: Recorder | None = None
        self._watches = watches
        self._waiting = {watch.site.name for watch in watches}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        touched = [watch for watch in self._watches if watch.running_sum is not None]
        if touched:
            operands = list(tensors((args, kwargs)))
            touched = [watch for watch in touched if any(t is watch.running_sum for t in operands)]
            if touched and not is_addition(func, kwargs, operands):
                touched = []
        result = func(*args, **kwargs)
        for watch in touched:
            self._sum_grows(watch, result)
        return result

    def layer_begins(self, watch: _Watch, module: nn.Module, args: Any, kwargs: Any) -> None:
        with self._unrecorded():
            watch.keep_input(next(tensors((args, kwargs))))
        watch.calls += 1
        if not watch.site.adds and watch.calls == watch.site.calls:
            self._finish(watch)

    def tail_ends(self, watch: _Watch, module: nn.Module, args: Any, output: Tensor) -> None:
        """``output`` is what the shortcut will be added to."""
        with self._unrecorded():
            watch.output = watch.part_of(output)
        watch.running_sum, watch.adds = output, 0

    def _sum_grows(self, watch: _Watch, total: Tensor) -> None:
        watch.running_sum, watch.adds = total, watch.adds + 1
        if watch.adds < watch.site.adds:
            return
        if self.recorder is not None:
            self.recorder.record_sum(watch.site.name, total)
        with self._unrecorded():
            part = watch.part_of(total)
            if part is not None and watch.output is not None:
                watch.addend = part - watch.output
        watch.running_sum = None
        self._finish(watch)

    def _unrecorded(self) -> AbstractContextManager[None]:
        return nullcontext() if self.recorder is None else self.recorder.pause()

    def _finish(self, watch: _Watch) -> None:
        self._waiting.discard(watch.site.name)
        if not self._waiting:
            raise _Finished
