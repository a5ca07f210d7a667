"""Networks and data the tests share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import leanconv

torch.set_num_threads(1)


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


def smooth_images(count: int = 24, size: int = 16, channels: int = 3, seed: int = 0) -> Tensor:
    """Noise with some structure, so that responses have a falling spectrum."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, channels, size // 4, size // 4, generator=generator)
    fine = torch.randn(count, channels, size, size, generator=generator)
    return nn.functional.interpolate(coarse, size=(size, size), mode="bilinear") + 0.3 * fine


def relative(a: Tensor, b: Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


@pytest.fixture
def network() -> nn.Module:
    return plain_network()


@pytest.fixture
def pictures() -> Tensor:
    return smooth_images()


@pytest.fixture(scope="module")
def accelerated() -> leanconv.Accelerated:
    return leanconv.accelerate(plain_network(), smooth_images(24), 2.0, samples=1000, progress=False)
