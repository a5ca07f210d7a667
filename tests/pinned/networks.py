"""Small networks and images, of numbers that every machine holds exactly."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.ops import MultiScaleRoIAlign

import leanconv

GRID = 128  # numbers are whole multiples of 1 / GRID, times a power of two


def numbers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Between -1 and 1. Whole numbers are drawn, so that no machine rounds them."""
    return torch.randint(-GRID, GRID + 1, shape, generator=generator) / GRID


def filled(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights of a usual size, and batch norms that folding can get wrong."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(model.named_parameters()):
        inputs = parameter[0].numel() if parameter.dim() > 1 else 16
        parameter.data = numbers(tuple(parameter.shape), generator) * 2.0 ** round(math.log2((6 / inputs) ** 0.5))
    for _, module in sorted(model.named_modules()):
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            size = (module.num_features,)
            module.running_mean = numbers(size, generator) / 8
            module.running_var = 1 + numbers(size, generator) / 2
            module.weight.data = 1 + numbers(size, generator) / 2
            module.bias.data = numbers(size, generator) / 8
    return model.eval()


def images(count: int = 48, size: int = 16, channels: int = 3, seed: int = 0) -> Tensor:
    """Noise with some structure, so that responses have a falling spectrum."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(count, channels, size, size)
    for cell in (4, 2, 1):
        coarse = numbers((count, channels, size // cell, size // cell), generator)
        total += coarse.repeat_interleave(cell, 2).repeat_interleave(cell, 3) * cell / 4
    return total


def plain() -> nn.Module:
    """A chain with a 1 x 1 and a grouped convolution."""
    return filled(
        nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 24, 3, padding=1, bias=False),
            nn.BatchNorm2d(24),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(24, 48, 1),
            nn.ReLU(),
            nn.Conv2d(48, 32, 3, padding=1, groups=2),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )
    )


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, channels: int, filters: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(filters)
        self.relu = nn.ReLU(inplace=True)
        same = channels == filters and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, filters, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class Residual(nn.Module):
    """A residual network in small."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(Block(16, 16), Block(16, 24, 2), Block(24, 24))
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def residual() -> nn.Module:
    return filled(Residual())


class Separable(nn.Module):
    """Depthwise layers, other paddings and activations, and two layers with nothing between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, padding_mode="reflect"), nn.Hardswish())
        self.depthwise = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect", groups=16), nn.SiLU())
        self.pointwise = nn.Sequential(nn.Conv2d(16, 32, 1), nn.SiLU())
        self.dense = nn.Sequential(nn.Conv2d(32, 24, 3, padding="same"), nn.BatchNorm2d(24), nn.SiLU())
        self.narrow = nn.Sequential(nn.Conv2d(24, 20, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(20))
        self.wide = nn.Sequential(nn.Conv2d(20, 32, 1), nn.Hardswish())
        self.last = nn.Sequential(nn.Conv2d(32, 24, (3, 5), padding=(1, 2)), nn.LeakyReLU(0.125))
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.pointwise(self.depthwise(self.stem(x))), 2)
        return self.head(self.last(self.wide(self.narrow(self.dense(x)))).mean((2, 3)))


def separable() -> nn.Module:
    return filled(Separable())


class Own(nn.Module):
    """A user's class: functions for activations, Linear layers, a layer for two maps and one that is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.shared = nn.Conv2d(16, 24, 3, padding=1)
        self.again = nn.Conv2d(24, 24, 3, padding=1)
        self.hidden = nn.Linear(24 * 16, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        large, small = (F.relu(self.shared(y)) for y in (x, F.avg_pool2d(x, 2)))
        y = F.relu(self.again(F.max_pool2d(large, 2) + small))
        y = F.relu(self.again(y))
        y = F.relu(self.hidden(F.avg_pool2d(y, 2).flatten(1)))
        return self.head(y)


def own() -> nn.Module:
    return filled(Own())


def one_dimension() -> nn.Module:
    """For signals."""
    return filled(
        nn.Sequential(
            nn.Conv1d(2, 16, 5, padding=2, padding_mode="circular"),
            nn.BatchNorm1d(16),
            nn.ELU(),
            nn.Conv1d(16, 24, 5, stride=2, padding=2),
            nn.BatchNorm1d(24),
            nn.GELU(),
            nn.Conv1d(24, 24, 3, dilation=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(24 * 12, 10),
        )
    )


def signals() -> Tensor:
    return images(size=32, channels=2)[:, :, 5]


def three_dimensions() -> nn.Module:
    """For volumes."""
    return filled(
        nn.Sequential(
            nn.Conv3d(1, 12, 3, padding=1),
            nn.ReLU6(),
            nn.Conv3d(12, 24, 3, padding=(0, 1, 1)),
            nn.BatchNorm3d(24),
            nn.PReLU(24),
            nn.Conv3d(24, 24, 3, padding=1),
            nn.Sigmoid(),
            nn.AdaptiveAvgPool3d(1),
            nn.Flatten(),
            nn.Linear(24, 10),
        )
    )


def volumes() -> Tensor:
    return images(16, 8, 5).unsqueeze(1)


def known() -> nn.Module:
    """One that the library can build by its name."""
    return filled(leanconv.models.resnet20_cifar())


def few_images() -> Tensor:
    return images(8, 32)


class Maps(nn.Module):
    """The backbone of a detector: three maps."""

    out_channels = 24

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, 2, 1)
        self.down = nn.ModuleList(nn.Conv2d(24, 24, 3, 2, 1) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x).relu()
        maps = OrderedDict()
        for number, layer in enumerate(self.down):
            x = layer(x).relu()
            maps[str(number)] = x
        return maps


def detector() -> nn.Module:
    """One of torchvision's, on a small backbone."""
    model = FasterRCNN(
        Maps(),
        rpn_anchor_generator=AnchorGenerator(((8,), (16,), (32,)), ((0.5, 1.0, 2.0),) * 3),
        box_roi_pool=MultiScaleRoIAlign(["0", "1", "2"], 3, 2),
        box_head=TwoMLPHead(24 * 9, 24),
        box_predictor=FastRCNNPredictor(24, 3),
        min_size=64,
        max_size=96,
    )
    return filled(model)


def scenes() -> list[list[Tensor]]:
    """Two batches of two images, each of its own size."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(64, 80), (72, 64), (64, 64), (90, 64)]
    given = [numbers((3, *size), generator) / 2 + 0.5 for size in sizes]
    return [given[:2], given[2:]]
