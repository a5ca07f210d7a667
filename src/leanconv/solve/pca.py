"""Principal components of responses: the linear, symmetric solution and the energies ranks are chosen by."""

from __future__ import annotations

import torch
from torch import Tensor

from leanconv.solve.low_rank import LowRank
from leanconv.solve.moments import Moments


def spectrum(y: Tensor) -> Tensor:
    """Eigenvalues (d, falling, >= 0, float64) of the covariance of ``y`` (n x d). Cost n d^2 + O(d^3)."""
    moments = Moments.of(y)
    values: Tensor = torch.linalg.eigvalsh(moments.scatter / max(moments.count, 1))
    return values.flip(0).clamp_min(0.0)


def pca(y: Tensor, rank: int, *, prior: Tensor | None = None) -> LowRank:
    """Linear, symmetric: M = U U^T with U the leading ``rank`` eigenvectors, b = mean - M mean.

    The squared error equals the sum of the eigenvalues left out, times n. ``prior`` (``Moments.regular``) orders
    directions the samples do not.
    """
    moments = Moments.of(y)
    u = torch.linalg.eigh(moments.regular(prior)).eigenvectors.flip(1)[:, :rank]
    b = moments.mean - u @ (u.T @ moments.mean)
    return LowRank(u.to(y.dtype), u.to(y.dtype), b.to(y.dtype))
