"""Principal components of responses: the linear, symmetric solution and the energies ranks are chosen by."""

from __future__ import annotations

import torch
from torch import Tensor

from leanconv.solve.low_rank import LowRank
from leanconv.solve.moments import Moments, in_basis


def spectrum(y: Tensor, *, basis: Tensor | None = None) -> Tensor:
    """Eigenvalues (d, falling, >= 0, float64) of the covariance of ``y`` (n x d). Cost n d^2 + O(d^3).

    ``basis`` (``range_basis``, d x m): of the space all y lie in; then the m values that can differ from zero.
    """
    moments = Moments.of(in_basis(y, None, basis)[0])
    values: Tensor = torch.linalg.eigvalsh(moments.scatter / max(moments.count, 1))
    return values.flip(0).clamp_min(0.0)


def pca(y: Tensor, rank: int, *, prior: Tensor | None = None, basis: Tensor | None = None) -> LowRank:
    """Linear, symmetric: M = U U^T with U the leading ``rank`` eigenvectors, b = mean - M mean.

    The squared error equals the sum of the eigenvalues left out, times n. ``prior`` (``Moments.regular``) orders
    directions the samples do not. ``basis`` as for ``spectrum``.
    """
    x, prior = in_basis(y, prior, basis)
    u = torch.linalg.eigh(Moments.of(x).regular(prior)).eigenvectors.flip(1)[:, :rank]
    if basis is not None:
        u = basis @ u
    mean = y.mean(0, dtype=torch.float64)
    b = mean - u @ (u.T @ mean)
    return LowRank(u.to(y.dtype), u.to(y.dtype), b.to(y.dtype))
