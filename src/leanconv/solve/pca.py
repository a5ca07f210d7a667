"""Principal components of responses: the linear, symmetric solution and the energies ranks are chosen by."""

from __future__ import annotations

import torch
from torch import Tensor

from leanconv.solve.low_rank import LowRank
from leanconv.solve.moments import Moments
from leanconv.solve.response_space import ResponseSpace


def spectrum(y: Tensor, *, space: ResponseSpace | None = None) -> Tensor:
    """Eigenvalues (d, falling, >= 0, float64) of the covariance of ``y`` (n x d). Cost n d^2 + O(d^3).

    With ``space``, only those that can differ from zero.
    """
    moments = Moments.of(y if space is None else space.coordinates(y))
    values: Tensor = torch.linalg.eigvalsh(moments.scatter / max(moments.count, 1))
    return values.flip(0).clamp_min(0.0)


def pca(y: Tensor, rank: int, *, space: ResponseSpace | None = None) -> LowRank:
    """Linear, symmetric: M = U U^T with U the leading ``rank`` eigenvectors, b = mean - M mean.

    The squared error equals the sum of the eigenvalues left out, times n. ``space`` orders
    directions the samples do not.
    """
    space = space or ResponseSpace.anywhere(y)
    u = torch.linalg.eigh(Moments.of(space.coordinates(y)).regular(space.prior)).eigenvectors.flip(1)[:, :rank]
    if space.basis is not None:
        u = space.basis @ u
    mean = y.mean(0, dtype=torch.float64)
    b = mean - u @ (u.T @ mean)
    return LowRank(u.to(y.dtype), u.to(y.dtype), b.to(y.dtype))
