"""Invented responses of a deep layer, and errors behind its ReLU."""

from __future__ import annotations

import torch
from torch import Tensor

from leanconv.solve import activation

relu = activation("relu")


def layer(images: int, seed: int = 0, noise: float = 1.0, own: float = 1.0) -> tuple[Tensor, Tensor]:
    """Responses of a deep layer: few images, whose rows are alike; mostly inactive; the input of the second is off.

    What is off is in part the same for all images (a map can repair that) and in part each image's own, times
    ``noise``; ``own``: how much the rows of an image differ."""
    d, each, same = 24, 30, torch.Generator().manual_seed(100)
    mix = torch.randn(d, d, generator=same, dtype=torch.float64) * torch.logspace(0, -1, d, dtype=torch.float64)
    turn = 0.15 * torch.randn(d, d, generator=same, dtype=torch.float64) / d**0.5
    g = torch.Generator().manual_seed(seed)
    of_image = torch.randn(images, d, generator=g, dtype=torch.float64).repeat_interleave(each, 0)
    rows = torch.randn(images * each, d, generator=g, dtype=torch.float64)
    target = (of_image + own * rows) @ mix.T - 1.0
    spoilt = torch.randn(images, d, generator=g, dtype=torch.float64).repeat_interleave(each, 0)
    y = target + (target + 1.0) @ turn.T + 0.1 * noise * spoilt
    return target, y


def error(fitted, target: Tensor, x: Tensor) -> float:
    return float((relu(fitted(x)) - relu(target)).square().sum())
