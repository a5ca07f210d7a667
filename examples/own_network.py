"""A network of your own: trained, accelerated, judged, saved and loaded, in 30 lines. Offline.

    python examples/own_network.py

The pictures are scikit-learn's digits.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import leanconv
from leanconv.demo import digits, teach


class Residual(nn.Module):
    """Two convolutions and a shortcut; functions and modules, as you like."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.second(F.relu(self.first(x)))))


def build() -> nn.Module:
    start, end = nn.Conv2d(1, 48, 3, stride=2), nn.Linear(48, 10)
    return nn.Sequential(start, nn.ReLU(), Residual(48), Residual(48), nn.AdaptiveAvgPool2d(1), nn.Flatten(), end)


def main(epochs: int = 5) -> None:
    pictures, labels = digits()
    torch.manual_seed(0)
    model = build()
    teach(model, pictures[:1000], labels[:1000], epochs=epochs)

    result = leanconv.accelerate(model, pictures[:500], speedup=3, samples=5000)  # no labels
    print(result)

    with tempfile.TemporaryDirectory() as scratch:
        folder = result.save(Path(scratch) / "mine-3x")
        loaded = leanconv.load(folder, model=build())  # leanconv cannot build your class by name
    with torch.no_grad():
        for name, network in {"original": model, "accelerated": result.model, "loaded": loaded}.items():
            right = network(pictures[1000:]).argmax(1) == labels[1000:]
            print(f"{name}: {100 * right.float().mean():.1f} % of {len(right)} digits it has not seen")


if __name__ == "__main__":
    main()
