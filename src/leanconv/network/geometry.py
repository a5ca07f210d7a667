"""The shape of a layer, and what the layer or its factors cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import nn

Scheme = Literal["channel", "spatial", "3d"]
SCHEMES: tuple[Scheme, ...] = ("channel", "spatial", "3d")

Pair = tuple[int, int]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Everything that decides where a filter looks. A Linear layer is a 1 x 1 convolution over its rows."""

    kind: Literal["conv2d", "linear"]
    in_channels: int
    out_channels: int
    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)
    padding: Pair | str = (0, 0)
    dilation: Pair = (1, 1)
    padding_mode: PaddingMode = "zeros"

    @classmethod
    def of(cls, layer: nn.Module) -> Geometry:
        if isinstance(layer, nn.Linear):
            return cls(kind="linear", in_channels=layer.in_features, out_channels=layer.out_features)
        assert isinstance(layer, nn.Conv2d)
        padding = layer.padding
        return cls(
            kind="conv2d",
            in_channels=layer.in_channels,
            out_channels=layer.out_channels,
            kernel=_pair(layer.kernel_size),
            stride=_pair(layer.stride),
            padding=padding if isinstance(padding, str) else _pair(padding),
            dilation=_pair(layer.dilation),
            padding_mode=layer.padding_mode,
        )

    @property
    def patch(self) -> int:
        """Numbers one filter looks at: k * k * c."""
        return self.in_channels * self.kernel[0] * self.kernel[1]

    @property
    def splits_spatially(self) -> bool:
        return self.kernel[0] > 1 and self.kernel[1] > 1

    @property
    def channel_limit(self) -> int:
        """The largest useful d': the rank of a d x (k k c) filter matrix."""
        return min(self.out_channels, self.patch)

    @property
    def spatial_limit(self) -> int:
        """The largest useful d'': the rank of the (c kh) x (d kw) filter matrix."""
        return min(self.in_channels * self.kernel[0], self.out_channels * self.kernel[1])

    def margins(self) -> tuple[int, int, int, int]:
        """Padding as (left, right, top, bottom). 'same' puts the odd one right and below, as torch does."""
        if self.padding == "valid":
            return 0, 0, 0, 0
        if self.padding == "same":
            total_h = self.dilation[0] * (self.kernel[0] - 1)
            total_w = self.dilation[1] * (self.kernel[1] - 1)
            return total_w // 2, total_w - total_w // 2, total_h // 2, total_h - total_h // 2
        assert not isinstance(self.padding, str)
        top, left = self.padding
        return left, left, top, top

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Geometry:
        pairs: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
        return cls(**pairs)


def _pair(values: tuple[int, ...]) -> Pair:
    height, width = values
    return height, width


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Multiply-accumulates of one layer for one image, whole or in factors. Every factor counts."""

    dense: int
    reduce: int  # a unit of d' in the channel scheme: the k x k filter
    expand: int  # a unit of d': the 1 x 1 filters it feeds
    vertical: int  # a unit of d'': the k x 1 filter, which still sees the full input width
    horizontal: int  # a unit of d'' x d' (or d'' x d): one 1 x k filter weight row
    filters: int  # d

    @classmethod
    def of(cls, geometry: Geometry, in_size: Pair, out_size: Pair) -> Cost:
        positions = out_size[0] * out_size[1]
        height, width = geometry.kernel
        return cls(
            dense=positions * geometry.out_channels * geometry.patch,
            reduce=positions * geometry.patch,
            expand=positions * geometry.out_channels,
            vertical=out_size[0] * in_size[1] * height * geometry.in_channels,
            horizontal=positions * width,
            filters=geometry.out_channels,
        )

    def channel(self, rank: int) -> int:
        return rank * (self.reduce + self.expand)

    def spatial(self, rank: int) -> int:
        return rank * (self.vertical + self.horizontal * self.filters)

    def both(self, spatial_rank: int, channel_rank: int) -> int:
        per_spatial = self.vertical + self.horizontal * channel_rank
        return spatial_rank * per_spatial + channel_rank * self.expand
