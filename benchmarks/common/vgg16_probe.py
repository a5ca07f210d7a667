"""VGG-16 with real ImageNet weights under a small linear head, and the pictures it is measured on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from leanconv.images import Preprocess, find_pictures
from leanconv.images.loading import spread, stream


class Vgg16Probe(nn.Module):
    """VGG-16's convolutions under a linear head on square-rooted, 2 x 2 pooled, unit-length features."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torchvision.models.vgg16(weights=None).features
        self.head = nn.Linear(2048, 1000)

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(self.features(x).sqrt(), 2).flatten(1)
        return self.head(F.normalize(pooled))


def vgg16_probe(weights: Path) -> nn.Module:
    """With the weights of a .safetensors file."""
    model = Vgg16Probe()
    state = safetensors.torch.load_file(weights)
    model.load_state_dict({key: value.float() for key, value in state.items()})
    return model.eval()


def read_pictures(path: Path, limit: int | None, classes: dict[str, list[Any]]) -> tuple[list[Tensor], Tensor]:
    """Batches of 50 pictures and their labels; ``limit``: so many, spread over all. ``classes``: number and name of
    each label in the file names."""
    pictures = find_pictures(path)
    if limit:
        pictures = spread(pictures, limit)
    batches, labels = [], []
    for tensor, chosen in stream(pictures, Preprocess(), batch=50, workers=min(8, os.cpu_count() or 1)):
        batches.append(tensor)
        labels += [classes[picture.label or ""][0] for picture in chosen]
    return batches, torch.tensor(labels)
