"""(k x 1, d'') + (1 x k, d') + (1 x 1, d): the paper's "3d", channels and space at once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from leanconv.forms.base import RESPONSES, Ranks
from leanconv.forms.spatial import FILTERS, Spatial
from leanconv.network.layers.geometry import Cost, Geometry
from leanconv.network.layers.modules import one_axis_convolution, pad_module, pointwise


@dataclass(frozen=True)
class ThreeD(Spatial):
    name = "3d"
    about = "k x 1 filters to d'', 1 x k to d', then 1 x 1; ranks are d'' x d'"
    axes = (FILTERS, RESPONSES)
    pointwise_end = True

    def macs(self, cost: Cost, ranks: Ranks) -> int:
        spatial_rank, channel_rank = ranks
        return spatial_rank * (cost.vertical + cost.horizontal * channel_rank) + channel_rank * cost.expand

    def modules(self, geometry: Geometry, ranks: Ranks) -> dict[str, nn.Module | None]:
        spatial_rank, channel_rank = ranks
        return {
            "pad": pad_module(geometry),
            "vertical": one_axis_convolution(geometry, 0, geometry.in_channels, spatial_rank, bias=False),
            "horizontal": one_axis_convolution(geometry, 1, spatial_rank, channel_rank, bias=False),
            "expand": pointwise(geometry, channel_rank, geometry.out_channels),
        }
