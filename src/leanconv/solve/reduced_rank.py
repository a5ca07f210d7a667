"""Reduced-rank regression: the best linear map of a given rank from one set of responses to another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leanconv.solve.low_rank import LowRank
from leanconv.solve.moments import Moments, chunks, roots


@dataclass(frozen=True)
class Regressor:
    """What depends on the inputs ``y`` alone, computed once and reused for every target.

    ``method.md``: M^ = Z Y^T (Y Y^T)^-1 and U = leading eigenvectors of M^ (Y Y^T) M^^T = A A^T with
    A = Z Y^T (Y Y^T)^(-1/2); then M = U U^T M^. All centred, all float64, d x d.

    Z Y^T is written as Y Y^T + (Z - Y) Y^T, so that M^ = I + (Z - Y) Y^T (Y Y^T)^-1. The targets are close to the
    inputs, so the second term is small and may be accumulated in float32: at Z = Y the answer is the identity to
    the last bit, which an inverse of an ill-conditioned Y Y^T would otherwise spoil. Directions in which y varies
    less than its own rounding are left out of the inverse, so M^ is the identity there too.
    """

    mean: Tensor
    root: Tensor
    inverse_root: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, y: Tensor, prior: Tensor | None = None) -> Regressor:
        """``prior``: see ``Moments.regular``."""
        moments = Moments.of(y)
        root, inverse_root = roots(moments.regular(prior), moments.noise(y.dtype))
        return cls(moments.mean, root, inverse_root, inverse_root @ inverse_root)

    def whitened(self, difference_by_y: Tensor) -> Tensor:
        """A (d x d) from the centred sum (z - y) y^T (d x d)."""
        a: Tensor = self.root + difference_by_y @ self.inverse_root
        return a

    def solution(self, u: Tensor, difference_by_y: Tensor, z_mean: Tensor, dtype: torch.dtype) -> LowRank:
        """P = U, Q = M^^T U, b = mean z - M mean y."""
        q = u + self.inverse @ (difference_by_y.T @ u)
        b = z_mean - u @ (q.T @ self.mean)
        return LowRank(u.to(dtype), q.to(dtype), b.to(dtype))


def leading_subspace(a: Tensor, rank: int) -> Tensor:
    """The ``rank`` leading eigenvectors (columns) of A A^T. Cost O(d^3)."""
    vectors: Tensor = torch.linalg.eigh(a @ a.T).eigenvectors
    return vectors[:, len(a) - rank :].flip(1)


def reduced_rank(
    z: Tensor, y: Tensor, rank: int, *, prior: Tensor | None = None, regressor: Regressor | None = None
) -> LowRank:
    """min over M of the given rank, b: sum ||z_i - (M y_i + b)||^2, for ``z``, ``y`` n x d.

    Where y has not varied in the sample M is the identity: the minimum is taken with pseudo-samples z = y of
    negligible weight, spread as ``prior`` says (``Moments.regular``), so a singular Y Y^T has a unique and harmless
    answer. ``regressor`` is that of ``y`` where it is already known. Cost 2 n d^2 multiply-adds in float64 and O(d^3).
    """
    regressor = regressor or Regressor.of(y, prior)
    width = y.shape[1]
    by_y = torch.zeros(width, width, dtype=torch.float64, device=y.device)
    total = torch.zeros(width, dtype=torch.float64, device=y.device)
    if z is not y:
        for rows in chunks(len(y), y.device):
            difference = z[rows].to(torch.float64) - y[rows]
            by_y.addmm_(difference.T, y[rows].to(torch.float64) - regressor.mean)
            total += difference.sum(0)
    u = leading_subspace(regressor.whitened(by_y), rank)
    z_mean = regressor.mean + total / max(len(y), 1)
    return regressor.solution(u, by_y, z_mean, y.dtype)
