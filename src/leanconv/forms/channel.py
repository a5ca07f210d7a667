"""(k x k, d') + (1 x 1, d): the paper's low-rank approximation of responses."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from leanconv.forms.base import RESPONSES, Form, Ranks
from leanconv.network.layers.geometry import Cost, Geometry
from leanconv.network.layers.modules import pad_module, plain_layer, pointwise


@dataclass(frozen=True)
class Channel(Form):
    name = "channel"
    about = "k x k filters to d' channels, then 1 x 1"
    axes = (RESPONSES,)
    pointwise_end = True

    def applies(self, geometry: Geometry) -> bool:
        return True

    def macs(self, cost: Cost, ranks: Ranks) -> int:
        return ranks[0] * (cost.reduce + cost.expand)

    def first_macs(self, cost: Cost, ranks: Ranks) -> int:
        return ranks[0] * cost.reduce

    def modules(self, geometry: Geometry, ranks: Ranks) -> dict[str, nn.Module | None]:
        wide = ranks[0] * geometry.groups
        return {
            "pad": pad_module(geometry),
            "reduce": plain_layer(geometry, wide, bias=False),
            "expand": pointwise(geometry, wide, geometry.out_channels, groups=geometry.groups),
        }
