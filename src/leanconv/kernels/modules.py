"""The modules that call the kernels: the network's own layers and blocks, under the same names, in another class."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from leanconv.kernels.custom_op import factored, runs_here
from leanconv.kernels.eager import finish
from leanconv.kernels.prepared import compute
from leanconv.network.layers.modules import Factored


class Absorbed(nn.Identity):
    """In the place of an activation or a pooling that the layer before it now does."""


class Fused(nn.Module):
    """A layer that does what follows it too: its ``activation``, and with ``pooled`` the 2 x 2 pooling behind that.

    It runs as torch's own operations, to the same numbers as before, wherever the kernels do not apply: on a CPU, in
    training, under autocast, if a factor has hooks, in traced and in exported programs, which run without leanconv
    (but for torch.export's strict mode).
    """

    activation: str = "none"
    pooled: bool = False

    def forward(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        layers = convolutions(self)
        weights, bias = [layer.weight for layer in layers], layers[-1].bias
        if self._plain(x, [tensor for tensor in (*weights, bias, addend) if tensor is not None]):
            return finish(self.unfused(x), addend, self.activation, self.pooled)
        for module in self.children():
            if not isinstance(module, nn.Conv2d):  # padding before the first convolution
                x = module(x)
        geometry = [number for layer in layers for number in geometry_of(layer)]
        # Going through the dispatcher takes longer than many a layer does; only what must see it goes through it.
        call = factored if torch.compiler.is_compiling() or type(x) is not Tensor else compute
        answer: Tensor = call(x, weights, bias, addend, geometry, self.activation, self.pooled)
        return answer

    def unfused(self, x: Tensor) -> Tensor:
        """The layer alone, in torch's own operations."""
        answer: Tensor = super().forward(x)
        return answer

    def _plain(self, x: Tensor, others: Sequence[Tensor]) -> bool:
        # Within torch.compile, torch 2.11 says that it is exporting.
        exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
        if exporting or not runs_here(x) or torch.is_autocast_enabled(x.device.type):
            return True
        traced = not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None
        if traced or any(child._forward_hooks or child._forward_pre_hooks for child in self.children()):
            return True
        trained = torch.is_grad_enabled() and (x.requires_grad or any(other.requires_grad for other in others))
        return trained or any(other.dtype != x.dtype or other.device != x.device for other in others)

    def extra_repr(self) -> str:
        parts = [super().extra_repr(), f"then={self.activation}" if self.activation != "none" else ""]
        return ", ".join(part for part in [*parts, "2 x 2 pooling" if self.pooled else ""] if part)


class FusedFactored(Fused, Factored):
    """Factors in a row, in one or two launches."""


class FusedConv2d(Fused, nn.Conv2d):
    """A convolution that was not factorised, with its activation in the same launch."""


def convolutions(layer: nn.Module) -> list[nn.Conv2d]:
    """The layer itself, or its factors."""
    modules = [layer] if isinstance(layer, nn.Conv2d) else layer.children()
    return [module for module in modules if isinstance(module, nn.Conv2d)]


def geometry_of(layer: nn.Conv2d) -> list[int]:
    """Stride, padding and dilation; the padding as numbers."""
    padding = layer.padding
    if isinstance(padding, str):
        around = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        padding = (around[0] // 2, around[1] // 2) if padding == "same" else (0, 0)
    return [*layer.stride, *padding, *layer.dilation]


def why_not(layer: nn.Conv2d) -> str | None:
    """Why the kernels cannot compute a convolution; None if they can."""
    if layer.groups != 1:
        return "it has groups"
    if layer.padding_mode != "zeros" and any(geometry_of(layer)[2:4]):
        return f"its padding is {layer.padding_mode}"
    uneven = [d * (k - 1) % 2 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    if layer.padding == "same" and any(uneven):
        return "its padding differs between the sides"
    return None


def _through(layer: nn.Module, norm: nn.Module, x: Tensor, relu: nn.Module, addend: Tensor | None = None) -> Tensor:
    """relu(norm(layer(x)) + addend). A fused layer does it all; its batch norm was folded into it."""
    if isinstance(layer, Fused) and type(norm) is nn.Identity:
        answer: Tensor = layer(x, addend)
        return answer
    x = norm(layer(x))
    activated: Tensor = relu(x if addend is None else x + addend)
    return activated


def _shortcut(block: BasicBlock | Bottleneck, x: Tensor) -> Tensor:
    return x if block.downsample is None else block.downsample(x)


class FusedBasicBlock(BasicBlock):  # type: ignore[misc]
    """torchvision's BasicBlock with fused layers: the last one adds the shortcut and applies the ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        y = _through(self.conv1, self.bn1, x, self.relu)
        return _through(self.conv2, self.bn2, y, self.relu, _shortcut(self, x))


class FusedBottleneck(Bottleneck):  # type: ignore[misc]
    """torchvision's Bottleneck, likewise."""

    def forward(self, x: Tensor) -> Tensor:
        y = _through(self.conv1, self.bn1, x, self.relu)
        y = _through(self.conv2, self.bn2, y, self.relu)
        return _through(self.conv3, self.bn3, y, self.relu, _shortcut(self, x))


# Only torchvision's own classes, whose forward is known.
BLOCKS: dict[type[nn.Module], type[nn.Module]] = {BasicBlock: FusedBasicBlock, Bottleneck: FusedBottleneck}
