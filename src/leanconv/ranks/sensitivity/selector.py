"""Ranks that together change the network's output least: what is measured of every layer, and the choice by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from leanconv.calibrate.gradients import Gradients
from leanconv.errors import LeanconvError, warn
from leanconv.forms import Axis, Choices, Form, Scheme
from leanconv.ranks.candidates import Candidate
from leanconv.ranks.merging import Pairs
from leanconv.ranks.selector import Energy, RankSelector, Request
from leanconv.ranks.sensitivity.measure import split_losses
from leanconv.ranks.sensitivity.merit import LayerSensitivity, least_change

# Shares of a layer's cost at which its splits are looked at.
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)


@dataclass(frozen=True)
class Sensitivity(Energy):
    """Measures how far the output moves by errors of every layer, and chooses the forms and ranks that together move it
    least."""

    name = "sensitivity"

    def prepared(self, model: nn.Module, sample: Any, *, comparable: bool) -> RankSelector:
        if not comparable:
            raise LeanconvError(
                f"ranks={self.name!r} compares outputs, and this network returns no floating-point tensors; use "
                "ranks='energy'."
            )
        return self

    def choose(self, request: Request) -> tuple[Choices, Pairs]:
        try:
            gradients = request.gradients()
        except LeanconvError as error:
            raise LeanconvError(f"ranks={self.name!r} needs gradients, and {error}; use ranks='energy'.") from error
        with request.streams.clock.stage("measuring layers"):
            measured = measure_sensitivity(request, gradients)
        return request.search("forms", least_change(measured, refits=request.refits and request.scheme.fitted))


@dataclass(frozen=True)
class Auto(Sensitivity):
    """By sensitivity where layers are fitted for images not seen and the output can be differentiated, else by
    energy."""

    name = "auto"

    def prepared(self, model: nn.Module, sample: Any, *, comparable: bool) -> RankSelector:
        return self

    def choose(self, request: Request) -> tuple[Choices, Pairs]:
        if not request.sees:  # the paper's fit has its ranks
            return request.search("greedy")
        try:
            return super().choose(request)
        except LeanconvError as error:
            if not isinstance(error.__cause__, LeanconvError):
                raise
            warn(f"ranks are chosen by energy, as gradients are not to be had: {error.__cause__}.")
            return request.search("greedy")


def measure_sensitivity(request: Request, gradients: Mapping[str, Gradients]) -> dict[str, LayerSensitivity]:
    """Of every candidate. What the notes know of splits already is not measured again."""
    streams, spectra, scheme = request.streams, request.spectra, request.scheme
    candidates = spectra.candidates
    splits = [axis for axis in scheme.axes if axis.basis is not None]
    # Nothing corrects the splits of a scheme that is not fitted.
    how = " as seen" if request.sees else "" if scheme.fitted else " as they are"
    key = {axis: f"{axis.name} splits{how}" for axis in splits}
    metrics = spectra.see(streams, gradients) if request.sees else None
    known = request.notes.read("sensitivity")
    split = {
        axis: {
            name: _by_share(one, scheme, axis)
            for name, one in candidates.items()
            if key[axis] not in known.setdefault(name, {})
        }
        for axis in splits
    }
    steps = sum(map(len, (some for layers in split.values() for some in layers.values())))
    with streams.reporter.stage("measuring splits", steps) as stage:
        for axis, layers in split.items():
            if any(layers.values()):
                losses = split_losses(
                    streams, spectra, axis, layers, stage.advance, corrected=scheme.fitted, metrics=metrics
                )
                for name, points in losses:
                    known[name][key[axis]] = points
    if any(split.values()):
        request.notes.write("sensitivity", known)
    return {
        name: LayerSensitivity(
            output=gradients[name].changes, splits={axis: known[name].get(key[axis], ()) for axis in splits}
        )
        for name in candidates
    }


def _by_share(one: Candidate, scheme: Scheme, axis: Axis) -> list[int]:
    """The ranks of a split that cost SHARES of the layer; not full rank."""
    spectrum = one.spectrum(axis)
    if spectrum is None:
        return []
    form = _split_form(scheme, axis)
    full, *others = form.limits(one.geometry)
    unit = form.macs(one.cost, (1, *others)) - form.macs(one.cost, (0, *others))
    found = {max(1, round(share * one.cost.dense / unit)) for share in SHARES}
    return sorted(rank for rank in found if rank < full and spectrum.kept[rank] < 1)


def _split_form(scheme: Scheme, axis: Axis) -> Form:
    """The form with fewest ranks that cuts along ``axis`` first."""
    return next(form for form in scheme.forms if form.axes[0] is axis)
