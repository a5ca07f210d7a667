"""The best linear maps of a given rank: from responses to themselves (principal components, whose energies ranks are
chosen by) and from one set of responses to another (reduced-rank regression)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leanconv.solve.metric import Metric
from leanconv.solve.moments import Moments, Sums, roots
from leanconv.solve.response_space import ResponseSpace


@dataclass(frozen=True)
class LowRank:
    """``y -> P Q^T y + b`` with P, Q: d x rank and b: d (M = P Q^T in ``method.md``)."""

    p: Tensor
    q: Tensor
    b: Tensor

    def __call__(self, y: Tensor) -> Tensor:
        """Apply to samples ``y`` (n x d). Cost 2 n d rank multiply-adds."""
        return torch.addmm(self.b, y @ self.q, self.p.T)

    def half(self, mean: Tensor) -> LowRank:
        """For samples without their ``mean`` and products in bfloat16: Q and P^T in that, b in its own dtype."""
        b = self.b + self.p @ (self.q.T @ mean.to(self.q.dtype))
        return LowRank(self.p.T.to(torch.bfloat16), self.q.to(torch.bfloat16), b)


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

    A ``space``'s share of pseudo-samples is a ridge: it is only in the inverse, and so in M^. The responses without it
    decide which directions are kept, A = M^ (Y Y^T)^(1/2).

    With a ``metric`` T, A is T M^ (Y Y^T)^(1/2), and U are its leading eigenvectors.
    """

    coordinates: Tensor  # x: n x m, in the dtype of the samples; y itself without a basis
    mean: Tensor  # of x
    half: Tensor  # (X X^T)^(1/2), m x m
    root: Tensor  # B (X X^T)^(1/2), d x m
    inverse: Tensor  # (X X^T)^-1, with the ridge, m x m
    whitener: Tensor  # the inverse times (X X^T)^(1/2)
    space: ResponseSpace
    metric: Metric | None = None

    @classmethod
    def with_moments(cls, moments: Moments, x: Tensor, space: ResponseSpace, metric: Metric | None = None) -> Regressor:
        """``moments``: of the coordinates ``x``, or of those of them to fit to."""
        half, inverse_root = roots(moments.regular(space.prior), moments.noise(x.dtype))
        root = half if space.basis is None else space.basis @ half
        plain = cls(x, moments.mean, half, root, inverse_root @ inverse_root, inverse_root, space, metric)
        return plain.ridged(moments, space.share)

    def ridged(self, moments: Moments, share: float) -> Regressor:
        """A regressor without a ridge gets that of a ``share`` of pseudo-samples."""
        if share <= moments.least_share:
            return self
        _, inverse_root = roots(moments.regular(self.space.prior, share), moments.noise(self.coordinates.dtype))
        inverse = inverse_root @ inverse_root
        return replace(self, inverse=inverse, whitener=inverse @ self.half)

    def whitened(self, difference_by_x: Tensor) -> Tensor:
        """A (d x m) from the centred sum (z - y) x^T (d x m)."""
        a: Tensor = self.root + difference_by_x @ self.whitener
        return a if self.metric is None else self.metric.root @ a

    def solution(self, u: Tensor, difference_by_x: Tensor, z_mean: Tensor, dtype: torch.dtype) -> LowRank:
        """P = T^-1 U, Q = M^^T T U, b = mean z - M mean: a map of the coordinates x. T is the metric's, or 1."""
        p = u
        if self.metric is not None:
            p, u = self.metric.inverse @ u, self.metric.root @ u
        direct = u if self.space.basis is None else self.space.basis.T @ u
        q = direct + self.inverse @ (difference_by_x.T @ u)
        b = z_mean - p @ (q.T @ self.mean)
        return LowRank(p.to(dtype), q.to(dtype), b.to(dtype))

    def directions(self, fitted: LowRank) -> Tensor:
        """U of a ``solution``, float64."""
        p = fitted.p.to(torch.float64)
        return p if self.metric is None else self.metric.root @ p

    def on_responses(self, fitted: LowRank) -> LowRank:
        """The same map of the responses y: Q^T x = (B Q)^T y. A map of a space's inputs stays as it is."""
        if self.space.basis is None or self.space.inputs is not None:
            return fitted
        return LowRank(fitted.p, self.space.basis.to(fitted.q.dtype) @ fitted.q, fitted.b)


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
    space = space or ResponseSpace.anywhere(y)
    x = space.coordinates(y)
    sums = Sums.of(z, y, x)
    regressor = Regressor.with_moments(sums.moments, x, space)
    return regressor.on_responses(linear(sums, rank, regressor, y.dtype))


def linear(sums: Sums, rank: int, regressor: Regressor, dtype: torch.dtype) -> LowRank:
    """``reduced_rank`` from the ``sums`` and a regressor of the same samples: a map of its coordinates."""
    u = leading_subspace(regressor.whitened(sums.by_x), rank)
    return regressor.solution(u, sums.by_x, sums.z_mean, dtype)


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
    u = components(y, space=space)[1][:, :rank]
    mean = y.mean(0, dtype=torch.float64)
    b = mean - u @ (u.T @ mean)
    return LowRank(u.to(y.dtype), u.to(y.dtype), b.to(y.dtype))


def components(y: Tensor, *, space: ResponseSpace | None = None, quick: bool = False) -> tuple[Tensor, Tensor]:
    """The eigenvalues of the scatter of ``y`` (n x d), falling, and their eigenvectors (columns), float64. ``quick``:
    see ``Products``."""
    space = space or ResponseSpace.anywhere(y)
    values, u = torch.linalg.eigh(Moments.of(space.coordinates(y), quick=quick).regular(space.prior))
    u = u.flip(1)
    return values.flip(0), u if space.basis is None else space.basis @ u
