"""Responses of sites at sampled positions, for one stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from leanconv.calibrate.batches import Batches, to_device
from leanconv.calibrate.patches import choose_positions, conv_patches, linear_patches, outputs_at
from leanconv.errors import LeanconvError
from leanconv.network.failure import model_failed
from leanconv.network.recognise import is_addition
from leanconv.network.recording import tensors
from leanconv.network.sites import Site
from leanconv.solve import ResponseSpace


@dataclass(frozen=True)
class Probe:
    """What to compute at a site from its input: ``weight`` (d x c x kernel, c of one group) and ``bias`` (d)."""

    site: Site
    weight: Tensor
    bias: Tensor

    @cached_property
    def spaces(self) -> list[ResponseSpace]:
        """Where the responses can lie, one for each group."""
        return [ResponseSpace.of(filters.flatten(1)) for filters in self.weight.chunk(self.site.geometry.groups)]

    def respond(self, patches: Tensor) -> Tensor:
        """Patches n x (C k) -> responses n x d."""
        groups = self.site.geometry.groups
        x = patches.to(self.weight.dtype)
        if groups == 1:
            return torch.addmm(self.bias, x, self.weight.flatten(1).T)
        # Channels, and so the columns, are sorted by group.
        x = x.reshape(len(x), groups, -1).transpose(0, 1)  # g x n x (c k)
        filters = self.weight.reshape(groups, -1, x.shape[2]).transpose(1, 2)  # g x (c k) x d / g
        return (x @ filters).transpose(0, 1).flatten(1) + self.bias


@dataclass(frozen=True)
class Responses:
    """``y``: n x d. ``addend``: what the network adds to them before the activation, n x d, or None."""

    y: Tensor
    addend: Tensor | None = None

    def part(self, number: int, groups: int) -> Responses:
        """Those of one group's filters."""
        if groups == 1:
            return self
        addend = None if self.addend is None else self.addend.chunk(groups, 1)[number].contiguous()
        return Responses(self.y.chunk(groups, 1)[number].contiguous(), addend)


class _Reached(BaseException):
    """The last probe has what it wants; the rest of the network need not run. No Exception: a network's own
    ``except Exception`` must not catch it."""


@dataclass
class _Watch:
    """A probe and what it has seen so far."""

    probe: Probe
    y: list[Tensor] = field(default_factory=list)
    addend: list[Tensor] = field(default_factory=list)
    unsound: Tensor | None = None
    # Of the batch that is running: the positions, the layer's own output there, and the sum as far as it has come.
    chosen: Tensor | None = None
    output: Tensor | None = None
    running_sum: Tensor | None = None
    adds: int = 0


def collect(
    model: nn.Module,
    batches: Batches,
    probes: Sequence[Probe],
    *,
    samples: int,
    seed: int,
    device: torch.device,
    step: Callable[[], None] = lambda: None,
) -> dict[str, Responses]:
    """Responses of every probe over all images, about ``samples`` of them.

    Hooks take a layer's *input* and compute the response from it, so operations in place behind the layer cannot
    spoil what was captured. Addends are the sum that reaches the activation less the layer's own output. The run of
    each batch stops after the last probe.
    """
    watches = [_Watch(probe) for probe in probes]
    per_image = max(1, -(-samples // batches.images))
    with torch.no_grad(), _watched(model, watches) as run:
        for number, batch in enumerate(batches.items):
            run.start(per_image, seed, number)
            try:
                model(to_device(batch, device))
            except _Reached:
                pass
            except LeanconvError:
                raise
            except Exception as error:
                raise model_failed(error, batch) from error
            step()
    return {watch.probe.site.name: _finished(watch) for watch in watches}


def _finished(watch: _Watch) -> Responses:
    site = watch.probe.site
    if watch.unsound is not None and bool(watch.unsound):
        raise LeanconvError(
            f"layer {site.name!r} receives NaN or infinite values on these images; check the images' preprocessing "
            "and the layers before it."
        )
    if not watch.y or (site.adds and len(watch.addend) != len(watch.y)):
        raise LeanconvError(
            f"layer {site.name!r} ran on the first image but not on others: what this network runs depends on the "
            "data; name that layer in skip."
        )
    return Responses(torch.cat(watch.y), torch.cat(watch.addend) if site.adds else None)


class _Run(TorchFunctionMode):
    """Follows one pass: inputs of layers through hooks, sums through the functions the network calls."""

    def __init__(self, watches: list[_Watch]):
        super().__init__()
        self._watches = watches
        self._waiting: set[str] = set()
        self._per_image = 1
        self._seed = (0, 0)

    def start(self, per_image: int, seed: int, batch: int) -> None:
        self._per_image, self._seed = per_image, (seed, batch)
        self._waiting = {watch.probe.site.name for watch in self._watches}
        for watch in self._watches:
            watch.chosen = watch.output = watch.running_sum = None

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
            self.sum_arrives(watch, result)
        return result

    def input_arrives(self, watch: _Watch, x: Tensor) -> None:
        probe, site = watch.probe, watch.probe.site
        bad = ~torch.isfinite(x).all()
        watch.unsound = bad if watch.unsound is None else watch.unsound | bad
        if site.geometry.kind == "linear":
            positions = x[0].numel() // x.shape[-1]
        else:
            positions = prod(site.geometry.out_size(tuple(x.shape[2:])))
        seed = (self._seed[0], site.index, self._seed[1])
        watch.chosen = choose_positions(len(x), positions, self._per_image, seed).to(x.device)
        if site.geometry.kind == "linear":
            patches = linear_patches(x, watch.chosen)
        else:
            patches = conv_patches(x, site.geometry, watch.chosen)
        watch.y.append(probe.respond(patches))
        if not site.adds:
            self._done(site)

    def output_arrives(self, watch: _Watch, y: Tensor) -> None:
        assert watch.chosen is not None
        watch.output = outputs_at(y, watch.probe.site.geometry.kind, watch.chosen)
        watch.running_sum, watch.adds = y, 0

    def sum_arrives(self, watch: _Watch, total: Tensor) -> None:
        site = watch.probe.site
        watch.running_sum, watch.adds = total, watch.adds + 1
        if watch.adds == site.adds:
            assert watch.chosen is not None
            assert watch.output is not None
            whole = outputs_at(total, site.geometry.kind, watch.chosen)
            dtype = watch.probe.weight.dtype
            watch.addend.append(whole.to(dtype) - watch.output.to(dtype))
            watch.running_sum = None
            self._done(site)

    def _done(self, site: Site) -> None:
        self._waiting.discard(site.name)
        if not self._waiting:
            raise _Reached


@contextmanager
def _watched(model: nn.Module, watches: list[_Watch]) -> Iterator[_Run]:
    """Hooks at the probes' layers (or what stands in their place); they come off on any error."""
    run = _Run(watches)
    handles = []
    for watch in watches:
        site = watch.probe.site

        def before(module: nn.Module, args: Any, kwargs: Any, watch: _Watch = watch) -> None:
            run.input_arrives(watch, next(tensors((args, kwargs))))

        handles.append(model.get_submodule(site.name).register_forward_pre_hook(before, with_kwargs=True))
        if site.adds:

            def after(module: nn.Module, args: Any, result: Any, watch: _Watch = watch) -> None:
                run.output_arrives(watch, result)

            handles.append(model.get_submodule(site.tail).register_forward_hook(after))
    try:
        # Functions are only looked at where a sum is awaited.
        if any(watch.probe.site.adds for watch in watches):
            with run:
                yield run
        else:
            yield run
    finally:
        for handle in handles:
            handle.remove()
