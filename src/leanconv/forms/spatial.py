"""(k x 1, d'') + (1 x k, d): Jaderberg's split of filters into vertical and horizontal ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from leanconv.errors import whole
from leanconv.forms.base import Axis, Form, Ranks
from leanconv.network.layers.geometry import Cost, Geometry
from leanconv.network.layers.modules import one_axis_convolution, pad_module
from leanconv.solve import Moments, SpatialFactors, TwoStep, spatial_basis, spatial_basis_as_seen, swept

FILTERS = Axis("spatial", "d''", "filters", lambda g: g.spatial_limit, spatial_basis, spatial_basis_as_seen)


@dataclass(frozen=True)
class Spatial(Form):
    """``sweeps``: how many times both halves of a split are fitted in turns to the original's responses before the
    layer is solved. 0: the split that is best for the filters alone."""

    name = "spatial"
    about = "k x 1 filters to d'' channels, then 1 x k"
    axes: ClassVar[tuple[Axis, ...]] = (FILTERS,)
    pointwise_end = False
    sweeps: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        whole("sweeps", self.sweeps, 0)

    def applies(self, geometry: Geometry) -> bool:
        return geometry.splits_spatially

    def macs(self, cost: Cost, ranks: Ranks) -> int:
        return ranks[0] * (cost.vertical + cost.horizontal * cost.filters)

    def first_macs(self, cost: Cost, ranks: Ranks) -> int:
        return ranks[0] * cost.vertical

    def modules(self, geometry: Geometry, ranks: Ranks) -> dict[str, nn.Module | None]:
        return {
            "pad": pad_module(geometry),
            "vertical": one_axis_convolution(geometry, 0, geometry.in_channels, ranks[0], bias=False),
            "horizontal": one_axis_convolution(geometry, 1, ranks[0], geometry.out_channels, bias=True),
        }

    @property
    def needs_patches(self) -> bool:
        return self.sweeps > 0

    def improved(self, split: TwoStep, weight: Tensor, patches: Moments) -> TwoStep:
        assert isinstance(split, SpatialFactors)
        return swept(split, weight, patches, self.sweeps)
