"""Ranks that together change the network's output least: what is measured of every layer, and the choice by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from leanconv.calibrate.gradients import Gradients
from leanconv.errors import LeanconvError, warn
from leanconv.forms import Choices
from leanconv.ranks.merging import Pairs
from leanconv.ranks.selector import Energy, RankSelector, Request
from leanconv.ranks.sensitivity.merit import LayerSensitivity, least_change


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
    """Of every candidate. What splits lose is said by the energies of the filters as the layers see them, also where
    they will be split otherwise."""
    spectra = request.spectra
    spectra.see(request.streams, gradients)
    return {
        name: LayerSensitivity(output=one.changes, splits=spectra.seen_energies(name))
        for name, one in gradients.items()
    }
