"""What rank selection knows of a layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from leanconv.forms import RESPONSES, Axis, Choice
from leanconv.network.layers.geometry import Cost, Geometry


class Energies:
    """Energy kept at every rank: ``kept[r]`` is the share of the total in the ``r`` largest values."""

    def __init__(self, values: list[float]):
        self.values = [max(value, 0.0) for value in values]
        sums = [0.0, *accumulate(self.values)]
        total = sums[-1]
        # A layer whose responses never vary loses nothing at any rank.
        self.kept = [value / total for value in sums] if total > 0 else [1.0] * len(sums)

    def loss(self, rank: int) -> float:
        """Relative energy loss of going from ``rank`` to ``rank - 1``: sigma_rank / sum of the first ``rank``."""
        return 1.0 - self.kept[rank - 1] / self.kept[rank] if self.kept[rank] > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layer that may be replaced. ``spectra``: the energies along each axis it can be cut on, by the axis' name; none
    where they were not measured."""

    name: str
    geometry: Geometry
    cost: Cost
    spectra: Mapping[str, Energies] = field(default_factory=dict)

    def macs(self, choice: Choice | None) -> int:
        return self.cost.dense if choice is None else choice.form.macs(self.cost, choice.ranks)

    def spectrum(self, axis: Axis) -> Energies | None:
        return self.spectra.get(axis.name)

    def kept(self, choice: Choice) -> dict[Axis, float]:
        """Energy kept along every axis the choice cuts, the responses first."""
        cut = zip(choice.form.axes, choice.ranks, strict=True)
        found = {axis: spectrum.kept[rank] if (spectrum := self.spectrum(axis)) else 1.0 for axis, rank in cut}
        return dict(sorted(found.items(), key=lambda item: item[0] is not RESPONSES))

    def energy(self, choice: Choice) -> float:
        """Energy kept: of the responses, or of the filters where a form cuts only these."""
        return next(iter(self.kept(choice).values()), 1.0)

    def log_energy(self, choice: Choice) -> float:
        """Of the energies along all axes together."""
        return math.log(max(math.prod(self.kept(choice).values()), 1e-300))
