"""Networks that tests share, and layers of every geometry."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock, ResNet

from benchmarks.common.initialise import initialise
from leanconv.network.survey import survey


def settle_batch_norms(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give batch norms statistics that folding can get wrong."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            size = module.num_features
            module.running_mean = torch.randn(size, generator=generator) * 0.1
            module.running_var = torch.rand(size, generator=generator) + 0.5
            module.weight.data = torch.rand(size, generator=generator) + 0.5
            module.bias.data = torch.randn(size, generator=generator) * 0.1
    return model.eval()


def plain_network(widths: tuple[int, ...] = (16, 24, 32, 32), *, batch_norm: bool = True) -> nn.Module:
    """VGG in small: 3 x 3 convolutions, batch norm, ReLU in place, 10 classes."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for number, width in enumerate(widths):
        layers.append(nn.Conv2d(channels, width, 3, padding=1))
        if batch_norm:
            layers.append(nn.BatchNorm2d(width))
        layers.append(nn.ReLU(inplace=True))
        if number == 1:
            layers.append(nn.MaxPool2d(2))
        channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return settle_batch_norms(nn.Sequential(*layers))


def residual_network() -> nn.Module:
    torch.manual_seed(0)
    network = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)
    network.layer3 = network.layer4 = nn.Identity()
    network.fc = nn.Linear(128, 10)
    return settle_batch_norms(network)


class Centres(nn.Module):
    """Batch-dependent: an image's answer depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.body = plain_network()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x - x.mean(0, keepdim=True))


class Residual(nn.Module):
    """Two blocks, the second with 1 x 1 layers around its 3 x 3 one and on the shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.a = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
        self.b = nn.Sequential(
            nn.Conv2d(16, 24, 1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 48, 1)
        )
        self.shortcut = nn.Conv2d(16, 48, 1)
        self.head = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (x + self.a(x)).relu()
        x = (self.shortcut(x) + self.b(x)).relu()
        return self.head(x.mean((2, 3)))


def residual() -> nn.Module:
    torch.manual_seed(0)
    return Residual().eval()


# One table drives every scheme: attributes of the layer under test, between two plain ones.
CONV_CASES: dict[str, dict] = {
    "plain": {"kernel_size": 3, "padding": 1},
    "no padding": {"kernel_size": 3},
    "stride": {"kernel_size": 3, "padding": 1, "stride": 2},
    "unequal stride": {"kernel_size": 3, "padding": 1, "stride": (2, 1)},
    "dilation": {"kernel_size": 3, "padding": 2, "dilation": 2},
    "no bias": {"kernel_size": 3, "padding": 1, "bias": False},
    "same": {"kernel_size": 3, "padding": "same"},
    "same, even kernel": {"kernel_size": 4, "padding": "same"},
    "same, dilation": {"kernel_size": 3, "padding": "same", "dilation": 3},
    "valid": {"kernel_size": 3, "padding": "valid"},
    "reflect": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    "replicate": {"kernel_size": 5, "padding": 2, "padding_mode": "replicate"},
    "circular": {"kernel_size": 3, "padding": (1, 2), "padding_mode": "circular"},
    "wide kernel": {"kernel_size": (3, 5), "padding": (1, 2)},
    "tall kernel, stride": {"kernel_size": (5, 2), "stride": (1, 2)},
    "column": {"kernel_size": (3, 1), "padding": (1, 0)},
    "groups": {"kernel_size": 3, "padding": 1, "groups": 2},
    "groups, stride, dilation": {"kernel_size": (3, 5), "stride": 2, "dilation": (1, 2), "groups": 2},
    "1 x 1": {"kernel_size": 1},
    "1 x 1, groups": {"kernel_size": 1, "groups": 2, "bias": False},
    "1 x 1, stride": {"kernel_size": 1, "stride": 2},
}


def network_of(case: dict, out_channels: int = 10) -> nn.Module:
    torch.manual_seed(0)
    return settle_batch_norms(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, out_channels, **case),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, 6, 3),
            nn.Flatten(2),
        )
    )


def full_ranks(model: nn.Module, images: Tensor, scheme: str, names: list[str]) -> dict:
    ranks: dict = {}
    for site in survey(model, images[:1]).sites:
        g = site.geometry
        if site.name not in names or (scheme == "spatial" and not g.splits_spatially):
            continue
        if scheme == "channel" or not g.splits_spatially:
            ranks[site.name] = g.channel_limit
        else:
            ranks[site.name] = g.spatial_limit if scheme == "spatial" else (g.spatial_limit, g.channel_limit)
    return ranks


class Odd(nn.Module):
    """One of everything that is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.again = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.unused = nn.Conv2d(8, 8, 3)
        self.line = nn.Conv1d(8, 8, 3)
        self.tied = nn.Conv2d(8, 8, 3, padding=1)
        self.tied_too = nn.Conv2d(8, 8, 3, padding=1)
        self.tied_too.weight = self.tied.weight
        self.hooked = nn.Conv2d(8, 8, 3, padding=1)
        self.hooked.register_forward_hook(lambda module, given, answer: answer + 1)
        self.custom = CustomConv(8, 8, 3, padding=1)
        self.kernel = nn.Parameter(torch.randn(8, 8, 3, 3))
        self.listed = [nn.Conv2d(8, 8, 3, padding=1)]
        self.held = self.listed[0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(self.depthwise(self.plain(x)))
        x = self.up(self.again(self.again(x)))
        x = self.custom(self.hooked(self.tied_too(self.tied(x))))
        x = self.listed[0](F.conv2d(x, self.kernel))
        return self.line(x.flatten(2))


class CustomConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def small_features() -> nn.Sequential:
    """VGG in small: four blocks of a convolution, a ReLU and a pooling."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in [(3, 8), (8, 12), (12, 16), (16, 20)]:
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return initialise(nn.Sequential(*layers))
