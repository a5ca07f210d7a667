"""Linear layers: a convolution of size 1 over rows."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from leanconv.network.layers.geometry import Geometry, Size


class Linear:
    """See ``kinds.LayerKind``. The map has one dimension, the rows of one image; channels come last."""

    name = "linear"
    module: type[nn.Module] = nn.Linear
    functions: frozenset[Any] = frozenset([F.linear])
    refusal: str | None = None
    over_a_map = False

    def geometry(self, layer: Any) -> Geometry:
        filters, channels = layer.weight.shape
        return Geometry(kind=self.name, in_channels=channels, out_channels=filters)

    def build(self, g: Geometry, *, bias: bool) -> nn.Module:
        return nn.Linear(g.in_channels, g.out_channels, bias=bias)

    def channel_axis(self, dimensions: int) -> int:
        return dimensions - 1

    def sizes(self, in_shape: Size, out_shape: Size, batch: int) -> tuple[Size, Size, int]:
        rows = prod(out_shape[:-1]) // batch
        return (rows,), (rows,), 1

    def macs(self, weight_shape: Size, in_shape: Size, out_shape: Size, batch: int) -> int:
        return prod(out_shape[:-1]) // batch * prod(weight_shape)

    def groups(self, weight_shape: Size, in_channels: int, out_channels: int) -> int:
        return 1

    def input_shape(self, g: Geometry, in_size: Size, batch: int) -> Size:
        (rows,) = in_size
        return (batch, g.in_channels) if rows == 1 else (batch, rows, g.in_channels)

    def trial_shapes(self, layer: Any, in_size: Size) -> list[Size]:
        return [(rows, layer.in_features) for rows in (2, 9, 1)]

    def map_size(self, x: Tensor) -> Size:
        return (prod(x.shape[1:-1]),)

    def rows(self, y: Tensor) -> Tensor:
        return y.reshape(y.shape[0], -1, y.shape[-1])

    def window(self, g: Geometry, in_size: Size, at: Tensor) -> tuple[Tensor, Tensor | None]:
        return at[..., None], None

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, g: Geometry) -> Tensor:
        return F.linear(x, weight, bias)

    def onnx(self, layer: Any, example: Tensor) -> tuple[str, dict[str, Any]] | None:
        return ("Gemm", {"transB": 1}) if example.dim() == 2 else None
