"""Low rank through the activation: the alternating solver."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from leanconv.solve.activations import Activation
from leanconv.solve.device import Number
from leanconv.solve.low_rank import LowRank
from leanconv.solve.moments import chunks
from leanconv.solve.reduced_rank import Regressor, leading_subspace, linear
from leanconv.solve.response_space import ResponseSpace
from leanconv.solve.sums import Sums
from leanconv.system.precision import quick_products

# (lambda, iterations): the paper's continuation.
SCHEDULE = ((0.01, 25), (1.0, 25))

# The true error is looked at this often.
CHECK_EVERY = 5

# Chunks summed in the dtype of the samples before they join the float64 sum.
FLUSH_EVERY = 8


@dataclass(frozen=True)
class NonlinearFit:
    """``map`` is the best seen; ``errors`` the true squared errors at each check, the linear start first."""

    map: LowRank
    errors: tuple[float, ...]
    iterations: int

    @property
    def error(self) -> float:
        return min(self.errors)


def nonlinear(
    target: Tensor,
    y: Tensor,
    rank: int,
    activation: Activation,
    *,
    addend: Tensor | None = None,
    space: ResponseSpace | None = None,
    schedule: tuple[tuple[float, int], ...] = SCHEDULE,
    tolerance: float | None = 1e-3,
) -> NonlinearFit:
    """min over M of the given rank, b: sum ||r(t_i) - r(s_i + M y_i + b)||^2, for ``target`` t and ``y`` n x d.

    ``addend`` s (n x d, None for zero) is what a shortcut adds; the target then includes the true shortcut.
    In a ``space`` of m < d dimensions products are with the coordinates x of y, n x m. With a space's ``inputs`` x, of
    which y are the responses of given filters, the map is one of x, among all filters: never worse, at m / d the price.

    Relaxed with auxiliary z_i (``method.md``), alternating (i) reduced-rank regression of z - s on y and (ii) the
    z-step, from the linear solution. Symmetric when ``target`` is ``y``. A phase of the schedule ends early when
    the true error, looked at every 5 iterations, falls by less than ``tolerance`` relative; None never stops.
    The map returned is the one with the smallest true error of all those looked at, so it is never worse than
    the linear start.

    Step (i) needs the leading eigenvectors of a matrix that hardly moves between iterations. A step of orthogonal
    iteration from the previous ones never raises the relaxed error (the trace they capture cannot fall) and costs
    a fraction of an eigendecomposition; the last iteration of a phase that runs to its end is exact.

    Cost an iteration: n d (d + 2 rank) multiply-adds, the z-step and O(d^2 rank). A GPU is never kept waiting: whether
    to stop is asked of a look one iteration old, and the best map is kept by the device.
    """
    space = space or ResponseSpace.anywhere(y)
    x = space.coordinates(y)
    sums = Sums.of(target if addend is None else target - addend, y, x)
    regressor = Regressor.with_moments(sums.moments, x, space)
    descent = Descent(target, y, rank, activation, regressor, sums, addend=addend)
    best = _Best(descent.current)
    looks: list[Number] = []
    for weight, iterations in schedule:
        first = len(looks)
        for step in range(iterations):
            looking = step % CHECK_EVERY == 0
            squared = descent.sweep(weight, measure=looking)
            if looking:
                best.offer(descent.current, squared)
                looks.append(Number(squared))
            since = step % CHECK_EVERY
            if tolerance is not None and since == (0 if y.device.type == "cpu" else 1) and len(looks) - first > 1:
                before, now = looks[-2].read(), looks[-1].read()
                if before - now <= tolerance * before:
                    break
            descent.advance(exact=step == iterations - 1)
    squared = descent.squared_error()
    best.offer(descent.current, squared)
    errors = [look.read() for look in (*looks, Number(squared))]
    return NonlinearFit(descent.regressor.on_responses(best.map), tuple(errors), descent.iterations)


class Descent:
    """The alternating steps, from the linear solution: ``sweep`` and ``advance`` make ``current``, a map of the
    regressor's coordinates, into the next."""

    def __init__(
        self,
        target: Tensor,
        y: Tensor,
        rank: int,
        activation: Activation,
        regressor: Regressor,
        sums: Sums,
        *,
        addend: Tensor | None,
    ):
        """``sums``: of the regression of target - addend on ``y``."""
        self._target, self._y, self._addend, self._activation = target, y, addend, activation
        self._rank = rank
        self._activated = activation(target)
        # Products with x are taken centred: subtracting the mean's share afterwards would leave its rounding behind.
        self._centred = regressor.coordinates - regressor.mean.to(y.dtype)
        self._y_mean = sums.y / max(len(y), 1)
        self._sums = sums
        self._begin(regressor)

    def restarted(self, regressor: Regressor) -> Descent:
        """Another one on the same samples, with a regressor that differs in its ridge."""
        other = copy(self)
        other._begin(regressor)
        return other

    def _begin(self, regressor: Regressor) -> None:
        self.regressor = regressor
        self.current = linear(self._sums, self._rank, regressor, self._y.dtype)
        self.iterations = 0
        self._u = self.current.p.to(torch.float64)

    def sweep(self, weight: float, *, measure: bool) -> Tensor:
        """The z-step of every sample, and, if asked, the true squared error of ``current``."""
        x = self.regressor.coordinates
        with quick_products(x.device):
            self._by_x, self._total, squared = _z_sweep(
                self.current,
                self._target,
                self._activated,
                self._y,
                x,
                self._centred,
                self._addend,
                self._activation,
                weight,
                measure=measure,
            )
        return squared

    def advance(self, *, exact: bool = False) -> None:
        """The regression on the z of the last sweep; ``exact``: with its own eigenvectors."""
        a = self.regressor.whitened(self._by_x)
        self._u = leading_subspace(a, self._u.shape[1]) if exact else _advance(a, self._u)
        z_mean = self._y_mean + self._total / len(self._y)
        self.current = self.regressor.solution(self._u, self._by_x, z_mean, self._y.dtype)
        self.iterations += 1

    def squared_error(self, rows: slice = slice(None)) -> Tensor:
        """Of ``current``, on all samples or some."""
        addend = None if self._addend is None else self._addend[rows]
        x = self.regressor.coordinates[rows]
        return squared_error(self.current, self._activated[rows], x, addend, self._activation)

    def squared_size(self, rows: slice) -> Tensor:
        """sum ||r(t)||^2 of these samples, float64."""
        norm: Tensor = torch.linalg.vector_norm(self._activated[rows], dtype=torch.float64)
        return norm.square()


class _Best:
    """The map with the smallest error of those offered. Chosen where it lies: nobody waits for the device."""

    def __init__(self, first: LowRank):
        self.map = first
        self._error = torch.full((), math.inf, dtype=torch.float64, device=first.p.device)

    def offer(self, new: LowRank, squared: Tensor) -> None:
        better, old = squared < self._error, self.map
        self.map = LowRank(*(torch.where(better, *pair) for pair in ((new.p, old.p), (new.q, old.q), (new.b, old.b))))
        self._error = torch.where(better, squared, self._error)


def _z_sweep(
    current: LowRank,
    target: Tensor,
    activated: Tensor,
    y: Tensor,
    x: Tensor,
    centred: Tensor,
    addend: Tensor | None,
    activation: Activation,
    weight: float,
    *,
    measure: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One pass over the samples: sum (z - s - y)(x - mean)^T, sum (z - s - y), and, if asked,
    sum ||r(t) - r(s + M y + b)||^2.

    z is never stored: a chunk is made in a reused buffer, used and dropped while it is in cache. Products and the
    sums of a few chunks are in the dtype of the samples (the difference z - y is small), the rest in float64.
    """
    width = y.shape[1]
    by_x = torch.zeros(width, x.shape[1], dtype=torch.float64, device=y.device)
    total = torch.zeros(width, dtype=torch.float64, device=y.device)
    squared = torch.zeros((), dtype=torch.float64, device=y.device)
    partial = torch.zeros(width, x.shape[1], dtype=y.dtype, device=y.device)
    spans = list(chunks(len(y), y.device))
    rows_at_most = spans[0].stop
    hidden_buffer = y.new_empty(rows_at_most, current.q.shape[1])
    v_buffer = y.new_empty(rows_at_most, width)
    expand = current.p.T.contiguous()
    for number, rows in enumerate(spans):
        size = rows.stop - rows.start
        hidden = torch.mm(x[rows], current.q, out=hidden_buffer[:size])
        v = torch.addmm(current.b, hidden, expand, out=v_buffer[:size])
        if addend is not None:
            v += addend[rows]
        if measure:
            squared += _squared_distance(activation(v), activated[rows])
        difference = activation.z_step(target[rows], activated[rows], v, weight).sub_(y[rows])
        if addend is not None:
            difference -= addend[rows]
        partial.addmm_(difference.T, centred[rows])
        total += difference.sum(0)
        if number % FLUSH_EVERY == FLUSH_EVERY - 1 or number == len(spans) - 1:
            by_x += partial
            partial.zero_()
    return by_x, total, squared


def _squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """sum ||a_i - b_i||^2, float64. Rows are summed in their own dtype first."""
    rows: Tensor = torch.linalg.vector_norm(a - b, dim=1)
    return rows.to(torch.float64).square().sum()


def squared_error(
    fitted: LowRank, activated: Tensor, x: Tensor, addend: Tensor | None, activation: Activation
) -> Tensor:
    """sum ||r(t) - r(s + M x + b)||^2, float64, from r(t)."""
    squared = torch.zeros((), dtype=torch.float64, device=x.device)
    for rows in chunks(len(x), x.device):
        v = fitted(x[rows]) if addend is None else fitted(x[rows]) + addend[rows]
        squared += _squared_distance(activation(v), activated[rows])
    return squared


def _advance(a: Tensor, u: Tensor) -> Tensor:
    """A step of orthogonal iteration on A A^T + tiny I from the orthonormal columns ``u``.

    They hardly turn, so at unit length they are nearly orthonormal already, and Cholesky's factor of their products
    makes them so at the price of a few products: a QR takes five times longer on a GPU. Where they are nearly dependent
    (the spectrum is wide, and all are drawn to its head) that factor is inexact by the square of their condition, which
    a second one repairs; where it cannot, the step is not made. The tiny share, far under anything seen, keeps columns
    nobody has seen from vanishing. Columns that span everything have nowhere to turn.
    """
    if u.shape[0] == u.shape[1]:
        return u
    tiny = 1e-12 * a.square().sum() / len(a)
    moved = a @ (a.T @ u) + tiny * u
    moved = moved / torch.linalg.vector_norm(moved, dim=0)
    once, well, _ = _orthonormal(moved)
    twice, again, off = _orthonormal(once)
    return torch.where(well & again & (off < 0.5), twice, u)


def _orthonormal(columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The columns times the inverse of Cholesky's factor of their products, whether there was one, and how far the
    products were from the identity."""
    products = columns.T @ columns
    factor, failed = torch.linalg.cholesky_ex(products)
    off = (products - torch.eye(len(products), dtype=products.dtype, device=products.device)).abs().max()
    return torch.linalg.solve_triangular(factor.T, columns, upper=True, left=False), failed == 0, off
