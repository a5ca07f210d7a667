"""Which layers can really be replaced: a trial on the sample, since a network may do anything with its modules.

It may hold a layer in a plain list, read its attributes, ask for its type, or use a convolution's raw output beside
the batch norm that would be folded. So the trial puts exact stand-ins in place of layers, runs the network once and
compares its outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.network.activations import ActivationSpec
from leanconv.network.effective_conv import is_plain
from leanconv.network.fold import Filters, without_norm
from leanconv.network.function_trace import map_tensors, opaque, tensors
from leanconv.network.layers.kinds import LAYERS
from leanconv.network.layers.modules import Factored, Factors, dense_modules, filled, put
from leanconv.network.sites import Site
from leanconv.system.precision import exact_products

# Relative difference of outputs that rounding explains; a wrong replacement differs by far more.
SAME = {torch.float64: 1e-6, torch.float32: 1e-3}
SAME_HALF = 0.1

# A deep network may multiply rounding by thousands. Inputs that differ in their last bits (ROUNDING eps) show how much:
# MARGIN times that change is allowed too, up to AT_MOST.
ROUNDING, MARGIN, AT_MOST = 8, 4, 0.02


class Trial:
    """A network and its outputs on a sample. After every trial the network is as it was before."""

    def __init__(self, model: nn.Module, sample: Any):
        self.model, self._sample = model, sample
        self.filters = Filters(model)
        self.opaque = False  # whether the outputs hold something other than tensors and numbers
        self._reference = self._outputs()

    @property
    def comparable(self) -> bool:
        """Whether the outputs hold floating-point numbers to compare."""
        return any(output.is_floating_point() for output in self._reference)

    def survives(self, sites: Sequence[Site], stand_in: Callable[[Site], nn.Module], *, leniency: float = 1.0) -> bool:
        """Whether the outputs are the same with a stand-in for each layer, its batch norm included, and all stand-ins
        ran."""
        stand_ins: dict[str, nn.Module] = {}
        for site in sites:
            stand_ins[site.name] = stand_in(site)
            if site.batch_norm is not None:
                stand_ins[site.batch_norm] = without_norm(self.model.get_submodule(site.batch_norm))
        called: set[str] = set()
        try:
            with self._in_place(stand_ins, called):
                outputs = self._outputs()
        except Exception:
            return False
        return called >= {site.name for site in sites} and self._same(outputs, leniency)

    def dense_copy(self, site: Site) -> nn.Sequential:
        """A plain layer that computes what the site does, its batch norm included."""
        old = self.model.get_submodule(site.name).weight
        assert isinstance(old, Tensor)
        weight, bias = self.filters.of(site, old.dtype)
        return filled(lambda: dense_modules(site.geometry), Factors((weight,), bias), old)

    @cached_property
    def _rounding(self) -> list[float]:
        """What rounding may change in every output. Takes a run, which most networks do not need."""
        try:
            moved = self._outputs(_last_bits)
        except Exception:
            moved = []
        if len(moved) != len(self._reference):  # the network refuses such inputs
            moved = self._reference
        pairs = zip(moved, self._reference, strict=True)
        return [min(MARGIN * _difference(*pair), AT_MOST) for pair in pairs]

    def _same(self, outputs: list[Tensor], leniency: float) -> bool:
        if [output.shape for output in outputs] != [reference.shape for reference in self._reference]:
            return False
        differences = [_difference(*pair) for pair in zip(outputs, self._reference, strict=True)]
        allowed = [SAME.get(reference.dtype, SAME_HALF) for reference in self._reference]
        return all(
            difference <= leniency * same or difference <= leniency * self._rounding[index]
            for index, (difference, same) in enumerate(zip(differences, allowed, strict=True))
        )

    def _outputs(self, change: Callable[[Tensor], Tensor] = torch.clone) -> list[Tensor]:
        """Outputs on a copy of the sample, with the same random numbers every time."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]), exact_products():
            torch.default_generator.manual_seed(0)
            inputs = map_tensors(lambda tensor: change(tensor.detach()), self._sample)
            torch.default_generator.manual_seed(0)
            result = self.model(inputs)
            self.opaque |= opaque(result)
            return [output.detach().clone() for output in tensors(result)]

    @contextmanager
    def _in_place(self, stand_ins: Mapping[str, nn.Module], called: set[str]) -> Iterator[None]:
        """The paths of stand-ins that run inside the block join ``called``."""
        before = {path: self.model.get_submodule(path) for path in stand_ins}
        try:
            for path, module in stand_ins.items():
                # As factors will: a network that asks for the layer's type or attributes fails here.
                old = before[path]
                shape = old.weight.shape if isinstance(old, LAYERS) else ()
                wrapper = Factored([("whole", module)], shape).train(old.training)
                wrapper.register_forward_hook(lambda module, args, result, path=path: called.add(path))
                put(self.model, path, wrapper)
            yield
        finally:
            for path, module in before.items():
                put(self.model, path, module)


def replaceable(trial: Trial, sites: list[Site]) -> list[Site]:
    """The sites that can be replaced, with batch norm folded where that is right too.

    One extra run if all can be replaced, up to two a site otherwise.
    """

    def survive(sites: list[Site], leniency: float = 1.0) -> bool:
        return trial.survives(sites, stand_in, leniency=leniency)

    def stand_in(site: Site) -> nn.Module:
        layer = trial.model.get_submodule(site.name)
        return layer if site.batch_norm is None and is_plain(layer) else trial.dense_copy(site)

    if not trial.comparable:
        # Nothing to compare: fold no batch norm, so that no value can change.
        sites = [_unfolded(site) for site in sites]
    if survive(sites):
        return sites
    accepted: list[Site] = []
    for site in sites:
        for candidate in [site, _unfolded(site)] if site.batch_norm else [site]:
            if survive([candidate]):
                accepted.append(candidate)
                break
    # Rounding of many layers adds up.
    return accepted if survive(accepted, leniency=10.0) else []


def _unfolded(site: Site) -> Site:
    """Without its batch norm folded the response is the input of the norm, with no activation behind it."""
    if site.batch_norm is None:
        return site
    return replace(site, batch_norm=None, activation=ActivationSpec(), adds=0, feeds=None)


def _last_bits(tensor: Tensor) -> Tensor:
    """The same numbers but for rounding, within their range."""
    if not tensor.is_floating_point() or torch.equal(tensor, tensor.round()):
        return tensor.clone()  # whole numbers are labels or counts
    relative = ROUNDING * torch.finfo(tensor.dtype).eps
    moved = tensor * (1 + relative * (2 * torch.rand(tensor.shape).to(tensor) - 1))
    return moved.clamp(tensor.min(), tensor.max())


def _difference(output: Tensor, reference: Tensor) -> float:
    """Relative; 0 for numbers that are not floating-point."""
    if not reference.is_floating_point() or output.shape != reference.shape:
        return 0.0
    if not torch.equal(output.isnan(), reference.isnan()):
        return math.inf
    difference = float(torch.linalg.vector_norm((output - reference).double().nan_to_num()))
    size = float(torch.linalg.vector_norm(reference.double().nan_to_num()))
    return difference / size if size else (0.0 if difference == 0 else math.inf)
