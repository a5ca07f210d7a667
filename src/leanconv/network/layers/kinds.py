"""The kinds of layers leanconv knows, and what it asks of each. A new kind is a class and a row in ``KINDS``."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leanconv.network import reasons
from leanconv.network.layers.geometry import Geometry, Size


class LayerKind:
    """A convolution over maps of one to three dimensions. Other kinds are subclasses that override what differs.

    ``name``: in ``Geometry.kind`` and in saved results. ``module``: torch's class. ``function``: torch's function that
    computes it. Inputs are N x C x map, weights d x (C / groups) x kernel: d filters, C channels. Shapes are those of
    one call, of ``batch`` images or of more rows than that.
    """

    refusal: str | None = None  # why such layers are counted but never replaced
    over_a_map = True  # filters move over a map, so they may pad and stride; the rows of a Linear layer are no map

    def __init__(self, name: str, module: type[nn.Module], function: Callable[..., Tensor], dimensions: int) -> None:
        self.name, self.module, self.function, self.dimensions = name, module, function, dimensions

    def geometry(self, layer: Any) -> Geometry:
        """Of a layer whose class computes what ``module`` computes."""
        # Sizes are the weight's: surgery on a network often leaves old attributes behind.
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
        """One number per dimension, from any form torch takes: an int, a tuple of one, or one each."""
        values = (value,) if isinstance(value, int) else tuple(value)
        return values * self.dimensions if len(values) == 1 else values

    def build(self, g: Geometry, *, bias: bool) -> nn.Module:
        """A plain layer. Padding that torch's layers do not have is left out: ``pad_module`` does it."""
        padding = 0 if g.pads_apart else g.padding
        module: Any = self.module
        layer: nn.Module = module(
            *(g.in_channels, g.out_channels, g.kernel, g.stride, padding, g.dilation, g.groups),
            bias=bias,
            padding_mode=g.padding_mode,
        )
        return layer

    def channel_axis(self, dimensions: int) -> int:
        """The axis of the channels in an input or output of this many dimensions."""
        return dimensions - 1 - self.dimensions

    def sizes(self, in_shape: Size, out_shape: Size, batch: int) -> tuple[Size, Size, int]:
        """Map size before and after, and how often the layer runs on such a map for one image."""
        # A network that cuts images into tiles runs the layer on more rows than there are images.
        return in_shape[-self.dimensions :], out_shape[-self.dimensions :], max(1, out_shape[0] // batch)

    def macs(self, weight_shape: Size, in_shape: Size, out_shape: Size, batch: int) -> int:
        """Multiply-accumulates for one image."""
        return self._positions(out_shape) * prod(weight_shape) // batch

    def _positions(self, shape: Size) -> int:
        """In all rows: a detector runs layers on more rows than there are images."""
        return prod(shape[-self.dimensions :]) * prod(shape[: -self.dimensions - 1])

    def groups(self, weight_shape: Size, in_channels: int, out_channels: int) -> int:
        """Of a call of ``function``."""
        return in_channels // weight_shape[1]

    def input_shape(self, g: Geometry, in_size: Size, batch: int) -> Size:
        """The shape of an input of ``batch`` images."""
        return (batch, g.in_channels, *in_size)

    def trial_shapes(self, layer: Any, in_size: Size) -> list[Size]:
        """Input shapes that show what a layer of an unknown class computes; the first has ``in_size``."""
        g = self.geometry(layer)
        extent = [d * (k - 1) + 1 for d, k in zip(g.dilation, g.kernel, strict=True)]
        # Padding may depend on the size: the size in the network and some consecutive ones, never square.
        count = max(g.stride) + 2
        sizes = [in_size, *([e + 4 + more + axis for axis, e in enumerate(extent)] for more in range(count))]
        return [(1 + 8 * (index % 2), g.in_channels, *size) for index, size in enumerate(sizes)]

    def map_size(self, x: Tensor) -> Size:
        """Of an input or an output."""
        return tuple(x.shape[2:])

    def rows(self, y: Tensor) -> Tensor:
        """An input or an output as N x positions x channels; shares memory where it can."""
        return y.flatten(2).transpose(1, 2)

    def window(self, g: Geometry, in_size: Size, at: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where the patches of output positions ``at`` (N x p) lie in a map of ``in_size``: N x p x k flat indices, and
        which of them are inside the map (None: all). With a padding mode other than zeros the map is the padded one."""
        out_size = g.out_size(in_size)
        before, after = g.margins(in_size)
        padded = any(before) or any(after)
        if g.padding_mode != "zeros":  # the caller pads the image
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
        """The layer on a whole map, with the same padding by zeros on both sides."""
        padding = g.margins(self.map_size(x))[0]
        return self.function(x, weight, bias, g.stride, padding, g.dilation, g.groups)

    def onnx(self, layer: Any, example: Tensor) -> tuple[str, dict[str, Any]] | None:
        """ONNX's operator and its attributes for a plain layer with input ``example``; None where there is none."""
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


class TransposedConvolution(LayerKind):
    """Counted, never replaced. Weights are C x (d / groups) x kernel."""

    refusal = reasons.TRANSPOSED

    def macs(self, weight_shape: Size, in_shape: Size, out_shape: Size, batch: int) -> int:
        # Its filters are applied at every input position.
        return self._positions(in_shape) * prod(weight_shape) // batch

    def groups(self, weight_shape: Size, in_channels: int, out_channels: int) -> int:
        return out_channels // weight_shape[1]


class Linear(LayerKind):
    """A convolution of size 1 over a map of one dimension, the rows of one image; channels come last."""

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


_ALL = (
    LayerKind("conv1d", nn.Conv1d, torch.conv1d, 1),
    LayerKind("conv2d", nn.Conv2d, torch.conv2d, 2),
    LayerKind("conv3d", nn.Conv3d, torch.conv3d, 3),
    TransposedConvolution("conv_transpose1d", nn.ConvTranspose1d, torch.conv_transpose1d, 1),
    TransposedConvolution("conv_transpose2d", nn.ConvTranspose2d, torch.conv_transpose2d, 2),
    TransposedConvolution("conv_transpose3d", nn.ConvTranspose3d, torch.conv_transpose3d, 3),
    Linear("linear", nn.Linear, F.linear, 1),
)
KINDS: dict[str, LayerKind] = {kind.name: kind for kind in _ALL}
# Classes of layers that are counted, and of those that can be replaced.
LAYERS: tuple[type[Any], ...] = tuple(kind.module for kind in _ALL)
REPLACEABLE: tuple[type[Any], ...] = tuple(kind.module for kind in _ALL if kind.refusal is None)


def kind_of(layer: nn.Module) -> LayerKind:
    """The kind of one of ``LAYERS``, or of a subclass of it."""
    return next(kind for kind in _ALL if isinstance(layer, kind.module))


def kind_of_function(function: Any) -> LayerKind | None:
    """The kind of layer a function of torch computes."""
    return next((kind for kind in _ALL if kind.function is function), None)


def geometry_of(layer: nn.Module) -> Geometry:
    return kind_of(layer).geometry(layer)
