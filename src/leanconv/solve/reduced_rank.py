"""Reduced-rank regression: the best linear map of a given rank from one set of responses to another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leanconv.solve.low_rank import LowRank
from leanconv.solve.moments import Moments, chunks, roots
from leanconv.solve.space import ResponseSpace


@dataclass(frozen=True)
class Regressor:
    """What depends on the inputs ``y`` alone, computed once and reused for every target.

    ``method.md``: M^ = Z Y^T (Y Y^T)^-1 and U = leading eigenvectors of M^ (Y Y^T) M^^T = A A^T with
    A = Z Y^T (Y Y^T)^(-1/2); then M = U U^T M^. All centred, all float64, d x d.

    In a ``space`` of m < d dimensions everything is done on the coordinates x, with its basis B where the identity
    was: m x m and d x m matrices instead of d x d ones.

    Z Y^T is written as Y Y^T + (Z - Y) Y^T, so that M^ = I + (Z - Y) Y^T (Y Y^T)^-1. The targets are close to the
    inputs, so the second term is small and may be accumulated in float32: at Z = Y the answer is the identity to
    the last bit, which an inverse of an ill-conditioned Y Y^T would otherwise spoil. Directions in which y varies
    less than its own rounding are left out of the inverse, so M^ is the identity there too.

    A ``space``'s share of pseudo-samples is a ridge: it is in the inverse, and so in M^, alone. Which directions a rank
    is worth is decided by the responses there are, A = M^ (Y Y^T)^(1/2).
    """

    coordinates: Tensor  # x: n x m, in the dtype of the samples; y itself without a basis
    mean: Tensor  # of x
    root: Tensor  # B (X X^T)^(1/2), d x m
    inverse: Tensor  # (X X^T)^-1, with the ridge, m x m
    whitener: Tensor  # the inverse times (X X^T)^(1/2)
    basis: Tensor | None
    given: bool  # the coordinates were: a space with inputs

    @classmethod
    def of(cls, y: Tensor, space: ResponseSpace | None = None) -> Regressor:
        space = space or ResponseSpace.anywhere(y)
        x = space.coordinates(y)
        return cls.with_moments(Moments.of(x), x, space)

    @classmethod
    def with_moments(cls, moments: Moments, x: Tensor, space: ResponseSpace) -> Regressor:
        """``moments``: of the coordinates ``x``, or of as many of them as a fit is to see."""
        noise = moments.noise(x.dtype)
        root, inverse_root = roots(moments.regular(space.prior), noise)
        inverse, whitener = inverse_root @ inverse_root, inverse_root
        if space.share > moments.least_share:
            _, inverse_root = roots(moments.regular(space.prior, space.share), noise)
            inverse = inverse_root @ inverse_root
            whitener = inverse @ root
        if space.basis is not None:
            root = space.basis @ root
        return cls(x, moments.mean, root, inverse, whitener, space.basis, space.inputs is not None)

    def whitened(self, difference_by_x: Tensor) -> Tensor:
        """A (d x m) from the centred sum (z - y) x^T (d x m)."""
        a: Tensor = self.root + difference_by_x @ self.whitener
        return a

    def solution(self, u: Tensor, difference_by_x: Tensor, z_mean: Tensor, dtype: torch.dtype) -> LowRank:
        """P = U, Q = M^^T U, b = mean z - M mean: a map of the coordinates x."""
        direct = u if self.basis is None else self.basis.T @ u
        q = direct + self.inverse @ (difference_by_x.T @ u)
        b = z_mean - u @ (q.T @ self.mean)
        return LowRank(u.to(dtype), q.to(dtype), b.to(dtype))

    def on_responses(self, fitted: LowRank) -> LowRank:
        """The same map of the responses y: Q^T x = (B Q)^T y; one of given inputs stays as it is."""
        if self.basis is None or self.given:
            return fitted
        return LowRank(fitted.p, self.basis.to(fitted.q.dtype) @ fitted.q, fitted.b)


def leading_subspace(a: Tensor, rank: int) -> Tensor:
    """The ``rank`` leading left singular vectors (columns) of A (d x m). Cost O(d m min(d, m))."""
    if a.shape[0] <= a.shape[1]:
        vectors: Tensor = torch.linalg.eigh(a @ a.T).eigenvectors
        return vectors[:, len(a) - rank :].flip(1)
    right = torch.linalg.eigh(a.T @ a).eigenvectors[:, a.shape[1] - rank :].flip(1)
    left: Tensor = torch.linalg.qr(a @ right).Q
    return left


def reduced_rank(z: Tensor, y: Tensor, rank: int, *, space: ResponseSpace | None = None) -> LowRank:
    """min over M of the given rank, b: sum ||z_i - (M y_i + b)||^2, for ``z``, ``y`` n x d.

    Where y has not varied in the sample M is the identity: the minimum is taken with pseudo-samples z = y of
    negligible weight, spread over ``space``, so a singular Y Y^T has a unique and harmless answer. Cost 2 n d^2
    multiply-adds in float64 and O(d^3).
    """
    regressor = Regressor.of(y, space)
    return regressor.on_responses(linear_start(z, y, rank, regressor))


def linear_start(z: Tensor, y: Tensor, rank: int, regressor: Regressor) -> LowRank:
    """``reduced_rank`` with the regressor of ``y`` at hand: a map of its coordinates."""
    return linear_from(Differences.of(z, y, regressor.coordinates, regressor.mean), y, rank, regressor)


def linear_from(sums: Differences, y: Tensor, rank: int, regressor: Regressor) -> LowRank:
    """``linear_start`` with the ``sums`` at hand: a ridge is in the regressor alone."""
    u = leading_subspace(regressor.whitened(sums.by_x), rank)
    z_mean = (y.sum(0, dtype=torch.float64) + sums.total) / max(len(y), 1)
    return regressor.solution(u, sums.by_x, z_mean, y.dtype)


@dataclass(frozen=True)
class Differences:
    """What a regression of z on y needs beside the moments of x: sum (z - y)(x - mean)^T (d x m) and sum (z - y) (d),
    float64. ``mean``: what was subtracted, that of all x or of some."""

    mean: Tensor
    by_x: Tensor
    total: Tensor

    @classmethod
    def of(cls, z: Tensor, y: Tensor, x: Tensor, mean: Tensor) -> Differences:
        """Cost n d m multiply-adds in float64, none where z is y."""
        by_x = torch.zeros(y.shape[1], len(mean), dtype=torch.float64, device=y.device)
        total = torch.zeros(y.shape[1], dtype=torch.float64, device=y.device)
        if z is not y:
            for rows in chunks(len(y), y.device):
                difference = z[rows].to(torch.float64) - y[rows]
                total += difference.sum(0)
                by_x.addmm_(difference.T, x[rows].to(torch.float64) - mean)
        return cls(mean, by_x, total)

    def joined(self, other: Differences, mean: Tensor) -> Differences:
        """Those of the samples of both, around ``mean``."""
        parts = [one.by_x + torch.outer(one.total, one.mean - mean) for one in (self, other)]
        return Differences(mean, parts[0] + parts[1], self.total + other.total)
