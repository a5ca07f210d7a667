"""Two networks on the same images: how much more often the second is wrong, and whether that may be chance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leanconv.evaluation.classification import agreement, correct
from leanconv.system.text_table import table

# Rows whose probabilities are in memory at a time, in float64.
ROWS = 4096


def paired_interval(
    a_correct: Tensor, b_correct: Tensor, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float, float]:
    """Increase of error from a to b, the mean of a_i - b_i, with its bootstrap percentile interval.

    ``a_correct``, ``b_correct``: n booleans, the same images in the same order. The difference of an image is 1, 0 or
    -1. Among n images drawn with replacement their counts are multinomial: only the counts are drawn, which costs
    O(n + resamples).
    """
    difference = a_correct.long() - b_correct.long()
    images = len(difference)
    shares = [(difference == value).sum().item() / images for value in (1, 0, -1)]
    drawn = np.random.default_rng(seed).multinomial(images, shares, size=resamples)
    low, high = np.quantile((drawn[:, 0] - drawn[:, 2]) / images, [(1 - level) / 2, (1 + level) / 2])
    return difference.double().mean().item(), float(low), float(high)


def kl_divergence(logits: Tensor, reference: Tensor) -> float:
    """Mean over images of KL(p || q) in nats, p from ``reference`` and q from ``logits``, both n x classes."""
    return kl_divergences(logits, reference).mean().item()


def kl_divergences(logits: Tensor, reference: Tensor) -> Tensor:
    """The same of every image, n on the CPU; of maps, n x classes x height x width, the mean over their pixels."""
    rows, found = ROWS if logits.dim() == 2 else 1, []
    for ours, theirs in zip(logits.split(rows), reference.split(rows), strict=True):
        q, p = ours.double().log_softmax(1), theirs.double().log_softmax(1)
        found.append((p.exp() * (p - q)).sum(1).reshape(len(q), -1).mean(1))
    return torch.cat(found).clamp(min=0).cpu()  # rounding may leave a zero a little below


@dataclass(frozen=True)
class Change:
    """Shares of images on which both networks are right, and the increase of error with its interval, low to high."""

    original: float
    other: float
    increase: float
    low: float
    high: float

    @property
    def within_noise(self) -> bool:
        """Whether the interval contains 0."""
        return self.low <= 0 <= self.high

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "within_noise": self.within_noise}


@dataclass(frozen=True)
class Comparison:
    """Two classifiers, called ``original`` and ``other``; shares are of ``images``, intervals hold with probability
    ``level``. Printed, a table. ``about``: the data, the views of an image, and the images that could not be read."""

    original: str
    other: str
    images: int
    top1: Change
    top5: Change
    agreement: float
    kl: float
    level: float = 0.95
    about: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        facts = {**vars(self), "top1": self.top1.to_json(), "top5": self.top5.to_json(), **self.about}
        del facts["about"]
        return facts

    def __str__(self) -> str:
        changes = (self.top1, self.top5)
        rows = [
            [self.original, *(f"{100 * change.original:.2f}" for change in changes)],
            [self.other, *(f"{100 * change.other:.2f}" for change in changes)],
            ["increase of error, points", *(points(change.increase) for change in changes)],
            [
                f"{100 * self.level:g} % interval",
                *(f"{points(change.low)} to {points(change.high)}" for change in changes),
            ],
            ["within noise", *("yes" if change.within_noise else "no" for change in changes)],
        ]
        return "\n".join(
            [
                table(["", "top-1 %", "top-5 %"], rows),
                f"{self.images} images; the same first answer on {100 * self.agreement:.2f} %; "
                f"mean KL({self.original} || {self.other}) {self.kl:.4f}",
            ]
        )


def points(share: float) -> str:
    return f"{round(100 * share, 2) + 0.0:+.2f}"  # + 0.0: no "-0.00"


def compare(
    reference: Tensor, logits: Tensor, labels: Tensor, *, original: str, other: str, **about: Any
) -> Comparison:
    """``reference`` are the original's outputs, ``logits`` the other's, n x classes of the same images."""
    ours, theirs = correct(reference, labels), correct(logits, labels)

    def change(column: int) -> Change:
        a, b = ours[:, column], theirs[:, column]
        return Change(a.double().mean().item(), b.double().mean().item(), *paired_interval(a, b))

    return Comparison(
        original=original,
        other=other,
        images=len(labels),
        top1=change(0),
        top5=change(1),
        agreement=agreement(logits, reference),
        kl=kl_divergence(logits, reference),
        **about,
    )
