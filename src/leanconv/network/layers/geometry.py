"""The shape of a layer, and what it or its factors cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal

Size = tuple[int, ...]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Everything that decides where a filter looks; sizes have one number per dimension.

    A Linear layer is a convolution of size 1 over its rows. ``padding`` is that of both sides unless
    ``padding_after`` says otherwise. 'same' gives ceil(n / stride) positions: torch knows it for a stride of 1 only,
    TensorFlow (and timm's ports) for every stride. A filter of a grouped convolution sees in_channels / groups.
    """

    kind: str  # a name of ``kinds.KINDS``
    in_channels: int
    out_channels: int
    kernel: Size = (1,)
    stride: Size = (1,)
    padding: Size | str = (0,)
    dilation: Size = (1,)
    padding_mode: PaddingMode = "zeros"
    padding_after: Size | None = None
    groups: int = 1

    @property
    def patch(self) -> int:
        """Numbers one filter looks at: k * k * c, of its group's c."""
        return self.in_channels // self.groups * prod(self.kernel)

    @property
    def splits_spatially(self) -> bool:
        return self.kind == "conv2d" and min(self.kernel) > 1 and self.groups == 1

    @property
    def channel_limit(self) -> int:
        """The largest useful d' (a group): the rank of a group's d x (k k c) filter matrix."""
        return min(self.out_channels // self.groups, self.patch)

    @property
    def spatial_limit(self) -> int:
        """The largest useful d'': the rank of the (c kh) x (d kw) filter matrix."""
        return min(self.in_channels * self.kernel[0], self.out_channels * self.kernel[-1])

    @property
    def pads_apart(self) -> bool:
        """Whether no torch convolution has this padding: it differs between the sides, or is 'same' with a stride."""
        strided = self.padding == "same" and max(self.stride) > 1
        return strided or (self.padding_after is not None and self.padding_after != self.padding)

    def margins(self, in_size: Size) -> tuple[Size, Size]:
        """Padding before and after, per dimension. 'same' puts the odd one after, as torch and TensorFlow do."""
        if self.padding == "valid":
            return (0,) * len(self.kernel), (0,) * len(self.kernel)
        if self.padding == "same":
            total = same_padding(in_size, self.kernel, self.stride, self.dilation)
            return tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
        assert not isinstance(self.padding, str)
        return self.padding, self.padding if self.padding_after is None else self.padding_after

    def out_size(self, in_size: Size) -> Size:
        """Positions the filters are applied at."""
        before, after = self.margins(in_size)
        return tuple(
            (n + b + a - d * (k - 1) - 1) // s + 1
            for n, b, a, d, k, s in zip(in_size, before, after, self.dilation, self.kernel, self.stride, strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Geometry:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Multiply-accumulates of one layer for one image, whole or in factors."""

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


def same_padding(in_size: Size, kernel: Size, stride: Size, dilation: Size) -> Size:
    """Padding, both sides together, that gives ceil(n / stride) positions; with a stride of 1 it is d (k - 1)."""
    return tuple(
        max((-(-n // s) - 1) * s + d * (k - 1) + 1 - n, 0)
        for n, k, s, d in zip(in_size, kernel, stride, dilation, strict=True)
    )


def torch_pad(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Margins as F.pad takes them: the last dimension first, before and after in turn."""
    return [margin for pair in zip(reversed(before), reversed(after), strict=True) for margin in pair]
