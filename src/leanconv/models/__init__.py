"""Networks the method is measured on: SPP-10, AlexNet, VGG-16, residual networks, and one that reads characters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock
from torchvision.models.vgg import cfgs, make_layers

from leanconv.errors import whole


class SpatialPyramidPool(nn.Module):
    """Maximum over the cells of several grids: n x c x any height x any width -> n x (c * sum of level^2)."""

    def __init__(self, levels: tuple[int, ...] = (6, 3, 2, 1)) -> None:
        super().__init__()
        self.levels = levels

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.adaptive_max_pool2d(x, level).flatten(1) for level in self.levels], dim=1)

    def extra_repr(self) -> str:
        return f"levels={self.levels}"


class SPP10(nn.Sequential):
    """Seven convolutions, a spatial pyramid, three Linear layers; colour pictures of any size, 224 x 224 as a rule.

    A 224 x 224 picture gives maps of 109, pooled to 37, of 35, pooled to 18, and of 18 from there on: both poolings
    round up, or the 5 x 5 layer could not run on 35 x 35 with the same padding on all sides.
    """

    def __init__(self, num_classes: int = 1000) -> None:
        layers = [
            *_convolution(3, 96, 7, stride=2),
            nn.MaxPool2d(3, 3, ceil_mode=True),
            *_convolution(96, 256, 5, padding=1),
            nn.MaxPool2d(2, 2, ceil_mode=True),
            *_convolution(256, 512, 3, padding=1),
        ]
        for _ in range(4):
            layers += _convolution(512, 512, 3, padding=1)
        pyramid = SpatialPyramidPool()
        cells = sum(level**2 for level in pyramid.levels)
        classifier = nn.Sequential(
            nn.Linear(512 * cells, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, num_classes),
        )
        super().__init__(OrderedDict(features=nn.Sequential(*layers), pyramid=pyramid, classifier=classifier))


class VGG16Cifar(nn.Sequential):
    """VGG-16 with batch norm for 32 x 32 colour pictures: thirteen convolutions, five poolings, one Linear layer."""

    def __init__(self, num_classes: int = 10) -> None:
        features = make_layers(cfgs["D"], batch_norm=True)
        super().__init__(OrderedDict(features=features, flatten=nn.Flatten(), classifier=nn.Linear(512, num_classes)))


class ResNetCifar(nn.Sequential):
    """The residual network of 6 ``blocks`` + 2 layers for 32 x 32 colour pictures: three stages of ``blocks`` pairs of
    convolutions with 16, 32 and 64 filters; where the size changes, the shortcut is a 1 x 1 convolution."""

    def __init__(self, blocks: int, num_classes: int = 10) -> None:
        stages, inputs = [], 16
        for filters in (16, 32, 64):
            pairs = []
            for number in range(blocks):
                stride = 2 if number == 0 and filters > 16 else 1
                shortcut = None
                if stride > 1:
                    shortcut = nn.Sequential(nn.Conv2d(inputs, filters, 1, stride, bias=False), nn.BatchNorm2d(filters))
                pairs.append(BasicBlock(inputs, filters, stride, shortcut))
                inputs = filters
            stages.append(nn.Sequential(*pairs))
        super().__init__(
            OrderedDict(
                conv=nn.Conv2d(3, 16, 3, padding=1, bias=False),
                norm=nn.BatchNorm2d(16),
                relu=nn.ReLU(inplace=True),
                stages=nn.Sequential(*stages),
                pool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                classifier=nn.Linear(64, num_classes),
            )
        )


class CharacterCNN(nn.Sequential):
    """Four convolutions that read one character from a 24 x 24 grey picture: maps of 16, 8, 1 and 1."""

    def __init__(self, num_classes: int = 36) -> None:
        super().__init__(
            *_convolution(1, 48, 9),
            *_convolution(48, 64, 9),
            *_convolution(64, 128, 8),
            nn.Conv2d(128, num_classes, 1),
            nn.Flatten(),
        )


def _convolution(inputs: int, filters: int, kernel: int, *, stride: int = 1, padding: int = 0) -> list[nn.Module]:
    return [nn.Conv2d(inputs, filters, kernel, stride, padding), nn.ReLU(inplace=True)]


def spp10(num_classes: int = 1000) -> nn.Module:
    """The paper's SPP-10: seven convolutions, a spatial pyramid, three Linear layers."""
    return SPP10(whole("num_classes", num_classes, 1))


def alexnet(num_classes: int = 1000) -> nn.Module:
    """torchvision's AlexNet with random weights."""
    network: nn.Module = torchvision.models.alexnet(weights=None, num_classes=whole("num_classes", num_classes, 1))
    return network


def vgg16(num_classes: int = 1000) -> nn.Module:
    """torchvision's VGG-16 with random weights."""
    network: nn.Module = torchvision.models.vgg16(weights=None, num_classes=whole("num_classes", num_classes, 1))
    return network


def vgg16_cifar(num_classes: int = 10) -> nn.Module:
    """VGG-16 with batch norm for 32 x 32 colour pictures."""
    return VGG16Cifar(whole("num_classes", num_classes, 1))


def resnet20_cifar(num_classes: int = 10) -> nn.Module:
    """The residual network of 20 layers for 32 x 32 colour pictures."""
    return ResNetCifar(3, whole("num_classes", num_classes, 1))


def resnet56_cifar(num_classes: int = 10) -> nn.Module:
    """The residual network of 56 layers for 32 x 32 colour pictures."""
    return ResNetCifar(9, whole("num_classes", num_classes, 1))


def character_cnn(num_classes: int = 36) -> nn.Module:
    """Four convolutions that read one character from a 24 x 24 grey picture.

    Examples:
        >>> import leanconv, torch
        >>> leanconv.models.character_cnn()(torch.rand(2, 1, 24, 24)).shape
        torch.Size([2, 36])
    """
    return CharacterCNN(whole("num_classes", num_classes, 1))


# What ``leanconv:NAME`` on the command line and in saved folders builds.
BUILDERS: dict[str, Callable[..., nn.Module]] = {
    builder.__name__: builder
    for builder in (spp10, alexnet, vgg16, vgg16_cifar, resnet20_cifar, resnet56_cifar, character_cnn)
}
