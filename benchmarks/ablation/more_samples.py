"""What twice the images gain: as ``enough`` and ``needed`` of a layer's report predict it, and as measured.

    python -m benchmarks.ablation.more_samples --cache CIFAR --network resnet20 --speedup 2 --images 1000 --positions 25

CIFAR: see benchmarks/README.md. Every layer in turn, with the network before it accelerated, is fitted to so many
images and to twice as many, and judged by its error on as many others. Prints a table.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import leanconv
from benchmarks.common import cifar10
from leanconv.forms import fit
from leanconv.solve import Gap, parted


class Doubling:
    """Stands in for a layer's solver: the first quarter of the images, the first half, and the other half to judge."""

    def __init__(self, images: int):
        self.images, self.solve = images, fit._solve
        self.found: list[tuple[Gap, float]] = []

    def __call__(self, target: Any, given: Any, rank: int, r: Any, space: Any, parts: Any) -> Any:
        if r is not None:
            quarter = len(target.y) // self.images * (self.images // 4)
            judging = torch.arange(2 * quarter, len(target.y))
            errors, gaps = [], []
            for times in (1, 2):
                rows = torch.arange(times * quarter)
                wanted = target.at(rows)
                seen = wanted if given is target else given.at(rows)
                held_out = parted(len(rows), times * self.images // 4, alike=True)
                fitted, gap = self.solve(wanted, seen, rank, r, space.at(rows), held_out)
                errors.append(_error(fitted, target.at(judging), given.at(judging), r, space.at(judging).inputs))
                gaps.append(gap)
            self.found.append((gaps[0], 1 - errors[1] / errors[0]))
        return self.solve(target, given, rank, r, space, parts)


def _error(fitted: Any, target: Any, given: Any, r: Any, inputs: Tensor | None) -> float:
    found = fitted(given.y if inputs is None else inputs)
    wanted = r(fit._whole(target))
    return float((r(found if given.addend is None else found + given.addend) - wanted).norm() / wanted.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--network", choices=list(cifar10.NETWORKS), default="resnet20")
    parser.add_argument("--speedup", type=float, default=2.0)
    parser.add_argument("--images", type=int, default=1000, help="that are doubled")
    parser.add_argument("--positions", type=int, default=25, help="sampled of an image")
    given = parser.parse_args()
    model = cifar10.load(given.cache / f"{given.network}.safetensors", given.network)
    pictures = cifar10.read(given.cache)[0][0][: 4 * given.images]
    doubling = Doubling(len(pictures))
    with patch("leanconv.forms.fit._solve", doubling):
        leanconv.accelerate(model, pictures, given.speedup, samples=given.positions * len(pictures), progress=False)
    print("| layer, in the order of fitting | samples | needed | gain predicted | gained |\n|---|---|---|---|---|")
    predicted = [1 - gap.error(2 * gap.rows) / gap.error(gap.rows) for gap, _ in doubling.found]
    for number, ((gap, gained), gain) in enumerate(zip(doubling.found, predicted, strict=True), 1):
        print(f"| {number} | {gap.rows:,} | {gap.needed:,} | {100 * gain:.2f} % | {100 * gained:.2f} % |")
    print(f"| mean | | | {100 * statistics.mean(predicted):.2f} % | ", end="")
    print(f"{100 * statistics.mean(gained for _, gained in doubling.found):.2f} % |")


if __name__ == "__main__":
    main()
