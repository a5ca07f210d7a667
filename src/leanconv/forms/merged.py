"""A layer that stays whole and only takes in the 1 x 1 factor of the one before it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from leanconv.forms.base import Form, Ranks
from leanconv.network.layers.geometry import Cost, Geometry
from leanconv.network.layers.modules import dense_modules


@dataclass(frozen=True)
class Merged(Form):
    name = "merged"
    about = "takes in the 1 x 1 filters of the layer before it"
    axes = ()
    pointwise_end = False

    def applies(self, geometry: Geometry) -> bool:
        return False  # never chosen for itself

    def macs(self, cost: Cost, ranks: Ranks) -> int:
        return cost.dense

    def first_macs(self, cost: Cost, ranks: Ranks) -> int:
        return cost.dense

    def modules(self, geometry: Geometry, ranks: Ranks) -> dict[str, nn.Module | None]:
        return dict(dense_modules(geometry).named_children())
