"""What a layer or its factors cost, in multiply-accumulates."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod

from leanconv.network.layers.geometry import Geometry, Size


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Multiply-accumulates of one layer for one image, whole or in factors. Every factor counts."""

    dense: int
    reduce: int  # a unit of d': the k x k filter, one a group
    expand: int  # a unit of d': the 1 x 1 filters it feeds
    vertical: int  # a unit of d'': the k x 1 filter, which still sees the full input width
    horizontal: int  # a unit of d'' x d' (or d'' x d): one 1 x k filter weight row
    filters: int  # d
    inputs: int = 0  # a 1 x 1 filter on the layer's input; 0 in files of earlier releases
    inner: int = 0  # a k x k filter of one channel

    @classmethod
    def of(cls, geometry: Geometry, in_size: Size, out_size: Size, repeats: int = 1) -> Cost:
        """``repeats``: how often the layer runs on a map of this size for one image."""
        positions = repeats * prod(out_size)
        width = in_size[-1]
        if geometry.pads_apart:  # both ways at once, before the vertical factor
            before, after = geometry.margins(in_size)
            width += before[-1] + after[-1]
        return cls(
            dense=positions * geometry.out_channels * geometry.patch,
            reduce=positions * geometry.patch * geometry.groups,
            expand=positions * geometry.out_channels,
            vertical=repeats * out_size[0] * width * geometry.kernel[0] * geometry.in_channels,
            horizontal=positions * geometry.kernel[-1],
            filters=geometry.out_channels,
            inputs=repeats * prod(in_size) * geometry.in_channels,
            inner=positions * prod(geometry.kernel),
        )

    def __add__(self, other: Cost) -> Cost:
        """Of a layer that runs on another map too."""
        more = other._counts()
        return Cost(filters=self.filters, **{key: value + more[key] for key, value in self._counts().items()})

    def times(self, factor: float) -> Cost:
        """Of a layer that really runs ``factor`` times as often."""
        counts = {key: round(value * factor) for key, value in self._counts().items()}
        return Cost(filters=self.filters, **counts)

    def _counts(self) -> dict[str, int]:
        return {key: value for key, value in asdict(self).items() if key != "filters"}
