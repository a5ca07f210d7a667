"""Which errors of a response matter: the metric in which a map of low rank is closest to the target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# White noise added to a metric, as a share of its mean: it was seen on few images, and no direction counts for nothing.
DAMPING = 0.01


@dataclass(frozen=True)
class Metric:
    """An error e counts |T e|^2 with T = ``root``, upper triangular, d x d, float64.

    Regression at full rank is the same in every metric. Cut to a rank, M = T^-1 U U^T T M^, with U the leading
    eigenvectors of T M^ (Y Y^T) M^^T T^T.
    """

    root: Tensor

    @classmethod
    def of(cls, gram: Tensor) -> Metric | None:
        """T^T T is ``gram`` (sum g g^T over gradients g), damped; None where there were no gradients. Cost O(d^3)."""
        size = float(gram.diagonal().mean())
        if not 0 < size < float("inf"):
            return None
        noise = DAMPING * torch.eye(len(gram), dtype=torch.float64, device=gram.device)
        lower, failed = torch.linalg.cholesky_ex(gram.to(torch.float64) / size + noise)
        return None if failed else cls(lower.T.contiguous())

    def before(self, u: Tensor) -> Tensor:
        """T^T u."""
        return self.root.T @ u

    def behind(self, u: Tensor) -> Tensor:
        """T^-1 u."""
        found: Tensor = torch.linalg.solve_triangular(self.root, u, upper=True)
        return found
