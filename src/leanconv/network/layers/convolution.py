"""Convolutions over maps of one to three dimensions, and the transposed ones, which are only counted."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.network import reasons
from leanconv.network.layers.geometry import Geometry, Size


class Convolution:
    """See ``kinds.LayerKind``. Inputs are N x C x map, weights d x (C / groups) x kernel."""

    refusal: str | None = None
    over_a_map = True

    def __init__(self, name: str, module: type[nn.Module], function: Callable[..., Tensor], dimensions: int) -> None:
        self.name, self.module, self.dimensions = name, module, dimensions
        self.functions: frozenset[Any] = frozenset([function])
        self._function = function

    def geometry(self, layer: Any) -> Geometry:
        # Sizes are the weight's: surgery on a network often leaves the attributes behind.
        filters, channels, *kernel = layer.weight.shape
        return Geometry(
            kind=self.name,
            in_channels=channels * layer.groups,
            out_channels=filters,
            kernel=tuple(kernel),
            stride=self.each(layer.stride),
            padding=layer.padding if isinstance(layer.padding, str) else self.each(layer.padding),
            dilation=self.each(layer.dilation),
            padding_mode=layer.padding_mode,
            groups=layer.groups,
        )

    def each(self, value: int | Size) -> Size:
        """A number a dimension, as torch takes them: one for all, or one each."""
        return (value,) * self.dimensions if isinstance(value, int) else tuple(value)

    def build(self, g: Geometry, *, bias: bool) -> nn.Module:
        module: Any = self.module
        built: nn.Module = module(
            g.in_channels,
            g.out_channels,
            g.kernel,
            g.stride,
            0 if g.pads_apart else g.padding,
            g.dilation,
            g.groups,
            bias=bias,
            padding_mode=g.padding_mode,
        )
        return built

    def channel_axis(self, dimensions: int) -> int:
        return dimensions - 1 - self.dimensions

    def sizes(self, in_shape: Size, out_shape: Size, batch: int) -> tuple[Size, Size, int]:
        # A network that cuts images into tiles runs the layer on more rows than there are images.
        return in_shape[-self.dimensions :], out_shape[-self.dimensions :], max(1, out_shape[0] // batch)

    def macs(self, weight_shape: Size, in_shape: Size, out_shape: Size, batch: int) -> int:
        return self.count(out_shape) * prod(weight_shape) // batch

    def count(self, shape: Size) -> int:
        """Positions in all rows: a detector runs layers on more rows than there are images."""
        return prod(shape[-self.dimensions :]) * prod(shape[: -self.dimensions - 1])

    def groups(self, weight_shape: Size, in_channels: int, out_channels: int) -> int:
        return in_channels // weight_shape[1]

    def input_shape(self, g: Geometry, in_size: Size, batch: int) -> Size:
        return (batch, g.in_channels, *in_size)

    def trial_shapes(self, layer: Any, in_size: Size) -> list[Size]:
        g = self.geometry(layer)
        extent = [d * (k - 1) + 1 for d, k in zip(g.dilation, g.kernel, strict=True)]
        # Padding may depend on the size: look at the size the network uses and at some in a row, never square.
        count = max(g.stride) + 2
        sizes = [in_size, *([e + 4 + more + axis for axis, e in enumerate(extent)] for more in range(count))]
        return [(1 + 8 * (number % 2), g.in_channels, *size) for number, size in enumerate(sizes)]

    def map_size(self, x: Tensor) -> Size:
        return tuple(x.shape[2:])

    def rows(self, y: Tensor) -> Tensor:
        return y.flatten(2).transpose(1, 2)

    def window(self, g: Geometry, in_size: Size, at: Tensor) -> tuple[Tensor, Tensor | None]:
        out_size = g.out_size(in_size)
        before, after = g.margins(in_size)
        padded = any(before) or any(after)
        if g.padding_mode != "zeros":  # whoever gathers pads the image
            in_size = tuple(n + b + a for n, b, a in zip(in_size, before, after, strict=True))
            padded, before = False, (0,) * len(before)
        index = torch.zeros(1, 1, 1, dtype=torch.int64, device=at.device)
        inside = torch.ones(1, 1, 1, dtype=torch.bool, device=at.device)
        rest = at
        for axis, side in enumerate(in_size):
            inner = prod(out_size[axis + 1 :])
            corner = torch.div(rest, inner, rounding_mode="floor") * g.stride[axis] - before[axis]  # N x p
            rest = rest % inner
            along = torch.arange(g.kernel[axis], device=at.device) * g.dilation[axis]
            here = corner[:, :, None] + along
            if padded:
                inside = (inside[..., None] & ((here >= 0) & (here < side))[:, :, None]).flatten(2)
                here = here.clamp(0, side - 1)
            index = (index[..., None] * side + here[:, :, None]).flatten(2)
        return index, inside if padded else None

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, g: Geometry) -> Tensor:
        padding = g.margins(self.map_size(x))[0]
        return self._function(x, weight, bias, g.stride, padding, g.dilation, g.groups)

    def onnx(self, layer: Any, example: Tensor) -> tuple[str, dict[str, Any]] | None:
        if layer.padding_mode != "zeros":
            return None
        attributes: dict[str, Any] = {
            "kernel_shape": layer.kernel_size,
            "strides": layer.stride,
            "dilations": layer.dilation,
            "group": layer.groups,
        }
        if isinstance(layer.padding, str):
            attributes["auto_pad"] = {"same": "SAME_UPPER", "valid": "VALID"}[layer.padding]
        else:
            attributes["pads"] = [*layer.padding, *layer.padding]
        return "Conv", attributes


class TransposedConvolution(Convolution):
    """Counted, never replaced. Weights are C x (d / groups) x kernel."""

    refusal: str | None = reasons.TRANSPOSED

    def macs(self, weight_shape: Size, in_shape: Size, out_shape: Size, batch: int) -> int:
        # Its filters are applied at every input position.
        return self.count(in_shape) * prod(weight_shape) // batch

    def groups(self, weight_shape: Size, in_channels: int, out_channels: int) -> int:
        return out_channels // weight_shape[1]
