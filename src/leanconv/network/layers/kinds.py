"""The kinds of layers leanconv knows, and what it asks of each. A new kind is a class and a row in ``KINDS``."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from leanconv.network.layers.convolution import Convolution, TransposedConvolution
from leanconv.network.layers.geometry import Geometry, Size
from leanconv.network.layers.linear import Linear


class LayerKind(Protocol):
    """``name``: in ``Geometry.kind`` and in saved results. ``module``: torch's class. ``functions``: torch's functions
    that compute it. ``refusal``: why such layers are counted but never replaced; None where they are replaced.
    ``over_a_map``: whether filters move over a map, and so may pad and stride; rows of a Linear layer are no map.

    Shapes are those of one call, ``batch`` images or more rows than that. d filters, C channels.
    """

    name: str
    module: type[nn.Module]
    functions: frozenset[Any]
    refusal: str | None
    over_a_map: bool

    def geometry(self, layer: Any) -> Geometry:
        """Of a layer whose class computes what ``module`` computes."""
        ...

    def build(self, g: Geometry, *, bias: bool) -> nn.Module:
        """A plain layer. Padding that torch's layers do not have is left out: ``pad_module`` does it."""
        ...

    def channel_axis(self, dimensions: int) -> int:
        """The axis of an input or output of so many dimensions that channels lie on."""
        ...

    def sizes(self, in_shape: Size, out_shape: Size, batch: int) -> tuple[Size, Size, int]:
        """Map size before and after, and how often the layer runs on such a map for one image."""
        ...

    def macs(self, weight_shape: Size, in_shape: Size, out_shape: Size, batch: int) -> int:
        """Multiply-accumulates of one image."""
        ...

    def groups(self, weight_shape: Size, in_channels: int, out_channels: int) -> int:
        """Of a call of one of ``functions``."""
        ...

    def input_shape(self, g: Geometry, in_size: Size, batch: int) -> Size:
        """The shape of an input of ``batch`` images."""
        ...

    def trial_shapes(self, layer: Any, in_size: Size) -> list[Size]:
        """Input shapes that tell what a layer of an unknown class computes; the first is of ``in_size``."""
        ...

    def map_size(self, x: Tensor) -> Size:
        """Of an input or an output."""
        ...

    def rows(self, y: Tensor) -> Tensor:
        """An input or an output as N x positions x channels; shares memory where it can."""
        ...

    def window(self, g: Geometry, in_size: Size, at: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where the patches of output positions ``at`` (N x p) lie in a map of ``in_size``: N x p x k flat indices, and
        which of them are inside the map (None: all). With a padding mode other than zeros the map is the padded one."""
        ...

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, g: Geometry) -> Tensor:
        """The layer on a whole map, where zeros are padded alike on both sides."""
        ...

    def onnx(self, layer: Any, example: Tensor) -> tuple[str, dict[str, Any]] | None:
        """ONNX's operator and its attributes for a plain layer that is given ``example``; None where there is none."""
        ...


_ALL: tuple[LayerKind, ...] = (
    Convolution("conv1d", nn.Conv1d, torch.conv1d, 1),
    Convolution("conv2d", nn.Conv2d, torch.conv2d, 2),
    Convolution("conv3d", nn.Conv3d, torch.conv3d, 3),
    TransposedConvolution("conv_transpose1d", nn.ConvTranspose1d, torch.conv_transpose1d, 1),
    TransposedConvolution("conv_transpose2d", nn.ConvTranspose2d, torch.conv_transpose2d, 2),
    TransposedConvolution("conv_transpose3d", nn.ConvTranspose3d, torch.conv_transpose3d, 3),
    Linear(),
)
KINDS: dict[str, LayerKind] = {kind.name: kind for kind in _ALL}
# Classes of layers that are counted, and of those that can be replaced.
LAYERS: tuple[type[Any], ...] = tuple(kind.module for kind in _ALL)
REPLACEABLE: tuple[type[Any], ...] = tuple(kind.module for kind in _ALL if kind.refusal is None)

_OF_FUNCTION: dict[Any, LayerKind] = {function: kind for kind in _ALL for function in kind.functions}


def kind_of(layer: nn.Module) -> LayerKind:
    """The kind of one of ``LAYERS``, or of a subclass of it."""
    return next(kind for kind in _ALL if isinstance(layer, kind.module))


def kind_of_function(function: Any) -> LayerKind | None:
    """The kind of layer a function of torch computes."""
    return _OF_FUNCTION.get(function)


def geometry_of(layer: nn.Module) -> Geometry:
    return kind_of(layer).geometry(layer)
