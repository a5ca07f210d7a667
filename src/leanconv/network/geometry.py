"""The shape of a layer, and what the layer or its factors cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal

from torch import nn

Scheme = Literal["channel", "spatial", "3d"]
SCHEMES: tuple[Scheme, ...] = ("channel", "spatial", "3d")

Kind = Literal["conv1d", "conv2d", "conv3d", "linear"]
Size = tuple[int, ...]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]

KINDS: dict[type[nn.Module], Kind] = {nn.Conv1d: "conv1d", nn.Conv2d: "conv2d", nn.Conv3d: "conv3d"}


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Everything that decides where a filter looks; a number a dimension.

    A Linear layer is a convolution of size 1 over its rows.
    """

    kind: Kind
    in_channels: int
    out_channels: int
    kernel: Size = (1,)
    stride: Size = (1,)
    padding: Size | str = (0,)
    dilation: Size = (1,)
    padding_mode: PaddingMode = "zeros"

    @classmethod
    def of(cls, layer: nn.Module) -> Geometry:
        if isinstance(layer, nn.Linear):
            return cls(kind="linear", in_channels=layer.in_features, out_channels=layer.out_features)
        assert isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        padding = layer.padding
        return cls(
            kind=KINDS[type(layer)],
            in_channels=layer.in_channels,
            out_channels=layer.out_channels,
            kernel=tuple(layer.kernel_size),
            stride=tuple(layer.stride),
            padding=padding if isinstance(padding, str) else tuple(padding),
            dilation=tuple(layer.dilation),
            padding_mode=layer.padding_mode,
        )

    @property
    def patch(self) -> int:
        """Numbers one filter looks at: k * k * c."""
        return self.in_channels * prod(self.kernel)

    @property
    def splits_spatially(self) -> bool:
        return self.kind == "conv2d" and min(self.kernel) > 1

    @property
    def channel_limit(self) -> int:
        """The largest useful d': the rank of a d x (k k c) filter matrix."""
        return min(self.out_channels, self.patch)

    @property
    def spatial_limit(self) -> int:
        """The largest useful d'': the rank of the (c kh) x (d kw) filter matrix."""
        return min(self.in_channels * self.kernel[0], self.out_channels * self.kernel[-1])

    def margins(self) -> tuple[Size, Size]:
        """Padding before and after, a number a dimension. 'same' puts the odd one after, as torch does."""
        if self.padding == "valid":
            return (0,) * len(self.kernel), (0,) * len(self.kernel)
        if self.padding == "same":
            total = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
            return tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
        assert not isinstance(self.padding, str)
        return self.padding, self.padding

    def out_size(self, in_size: Size) -> Size:
        """Positions the filters are applied at."""
        before, after = self.margins()
        return tuple(
            (n + b + a - d * (k - 1) - 1) // s + 1
            for n, b, a, d, k, s in zip(in_size, before, after, self.dilation, self.kernel, self.stride, strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Geometry:
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
        }
        return cls(**values)


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
    def of(cls, geometry: Geometry, in_size: Size, out_size: Size, repeats: int = 1) -> Cost:
        """``repeats``: how often the layer runs on a map of this size for one image."""
        positions = repeats * prod(out_size)
        return cls(
            dense=positions * geometry.out_channels * geometry.patch,
            reduce=positions * geometry.patch,
            expand=positions * geometry.out_channels,
            vertical=repeats * out_size[0] * in_size[-1] * geometry.kernel[0] * geometry.in_channels,
            horizontal=positions * geometry.kernel[-1],
            filters=geometry.out_channels,
        )

    def channel(self, rank: int) -> int:
        return rank * (self.reduce + self.expand)

    def spatial(self, rank: int) -> int:
        return rank * (self.vertical + self.horizontal * self.filters)

    def both(self, spatial_rank: int, channel_rank: int) -> int:
        per_spatial = self.vertical + self.horizontal * channel_rank
        return spatial_rank * per_spatial + channel_rank * self.expand
