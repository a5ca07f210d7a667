"""Which errors of a response matter: the metric in which a map of low rank is closest to the target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# White noise added to a metric, as a share of its mean: it was seen on few images, and no direction counts for nothing.
DAMPING = 0.01
# Half way, geometrically, between what small errors do to the output and the plain distance: errors are not small once
# all layers have some.
POWER = 0.5


@dataclass(frozen=True)
class Metric:
    """An error e counts |T e|^2 with T = ``root``, symmetric; ``inverse`` is T^-1. Float64, d x d.

    Regression at full rank is the same in every metric. Cut to a rank, M = T^-1 U U^T T M^, with U the leading
    eigenvectors of T M^ (Y Y^T) M^^T T.
    """

    root: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, gram: Tensor) -> Metric | None:
        """T^2 is ``gram`` (sum g g^T over gradients g), damped, to the power POWER; None where there were no gradients.
        Cost O(d^3)."""
        size = float(gram.diagonal().mean())
        if not 0 < size < float("inf"):
            return None
        values, vectors = torch.linalg.eigh(gram.to(torch.float64) / size)
        roots = (values.clamp_min(0.0) + DAMPING) ** (POWER / 2)
        return cls((vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T)
