"""Networks, pictures and settings that the tests of training share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from leanconv.train.finetune import FineTuned, finetune

CLASSES = 4


def quadrants(count: int = 96, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noise with one of four corners brighter, and which."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    images = torch.randn(count, 3, 8, 8, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 0.7
    return images, labels


def small(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(6 * 16, CLASSES),
    ).eval()


def tune(network: object = None, data: object = None, original: nn.Module | None = None, **other: object) -> FineTuned:
    arguments = {"epochs": 2, "batch": 16, "lr": 0.05, "progress": False, **other}
    given = small() if network is None else network
    return finetune(given, quadrants() if data is None else data, original, **arguments)  # type: ignore[arg-type]


def assert_same_bits(a: nn.Module, b: nn.Module) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


def known(network: nn.Module | None = None) -> nn.Module:
    """A network that has learnt the corners."""
    return tune(network, epochs=6, lr=0.1, holdout=0.0).model


def write_pictures(folder: Path, count: int = 12, size: int = 12) -> None:
    """PNGs of noise with a bright half, in a folder for each side."""
    generator = np.random.default_rng(0)
    for number in range(count):
        side = number % 2
        pixels = generator.integers(0, 120, (size, size, 3), dtype=np.uint8)
        pixels[:, side * size // 2 : (side + 1) * size // 2] += 100
        path = folder / ("left", "right")[side] / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)


SETTINGS = {
    "distill": False,
    "epochs": 1,
    "batch": 8,
    "lr": 0.2,
    "optimizer": None,
    "weight_decay": 0.0,
    "schedule": "constant",
    "warmup": 0,
    "ema": 0.0,
    "clip": 0.0,
    "precision": "off",
    "holdout": 0.1,
    "patience": 0,
    "seed": 0,
}
