"""torchvision's residual blocks with fused layers: the shortcut is added, and the ReLU applied, in the last launch.

A block keeps its modules and gets another forward, that of a subclass; only blocks whose class is torchvision's own
are touched, whose forward is known.
"""

from __future__ import annotations

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from leanconv.kernels.modules import Fused


def _through(layer: nn.Module, norm: nn.Module, x: Tensor, relu: nn.Module, addend: Tensor | None = None) -> Tensor:
    """relu(norm(layer(x)) + addend). A fused layer does it all; its batch norm was folded into it."""
    if isinstance(layer, Fused) and type(norm) is nn.Identity:
        answer: Tensor = layer(x, addend)
        return answer
    x = norm(layer(x))
    if addend is not None:
        x = x + addend
    activated: Tensor = relu(x)
    return activated


def _shortcut(block: BasicBlock | Bottleneck, x: Tensor) -> Tensor:
    return x if block.downsample is None else block.downsample(x)


class FusedBasicBlock(BasicBlock):  # type: ignore[misc]
    """torchvision's BasicBlock with fused layers."""

    def forward(self, x: Tensor) -> Tensor:
        y = _through(self.conv1, self.bn1, x, self.relu)
        return _through(self.conv2, self.bn2, y, self.relu, _shortcut(self, x))


class FusedBottleneck(Bottleneck):  # type: ignore[misc]
    """torchvision's Bottleneck with fused layers."""

    def forward(self, x: Tensor) -> Tensor:
        y = _through(self.conv1, self.bn1, x, self.relu)
        y = _through(self.conv2, self.bn2, y, self.relu)
        return _through(self.conv3, self.bn3, y, self.relu, _shortcut(self, x))


CLASSES: dict[type[nn.Module], type[nn.Module]] = {BasicBlock: FusedBasicBlock, Bottleneck: FusedBottleneck}


def layers_of(block: nn.Module) -> list[tuple[str, nn.Module, nn.Module]]:
    """Name, convolution and batch norm of each layer whose activation is the block's ReLU."""
    count = 2 if isinstance(block, BasicBlock) else 3
    return [(f"conv{i}", getattr(block, f"conv{i}"), getattr(block, f"bn{i}")) for i in range(1, count + 1)]
