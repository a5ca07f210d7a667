"""Low rank through the activation: the alternating solver."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from leanconv.solve.activations import Activation
from leanconv.solve.moments import FLUSH_EVERY, Sums, chunks
from leanconv.solve.reduced_rank import LowRank, Regressor, leading_subspace, linear
from leanconv.solve.response_space import ResponseSpace
from leanconv.system.precision import multiplies_bfloat16, quick_products

# (lambda, iterations): the paper's continuation.
SCHEDULE = ((0.01, 25), (1.0, 25))

# The true error is measured once in this many iterations.
CHECK_EVERY = 5


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
    tolerance: float | None = 1e-3,
) -> NonlinearFit:
    """min over M of the given rank, b: sum ||r(t_i) - r(s_i + M y_i + b)||^2, for ``target`` t and ``y`` n x d.

    ``addend`` s (n x d, None for zero) is what a shortcut adds; the target then includes the true shortcut.
    In a ``space`` of m < d dimensions products are with the coordinates x of y, n x m. With a space's ``inputs`` x, of
    which y are filter responses, the map is from x, with any filters: never worse, at m / d times the cost.

    Relaxed with auxiliary z_i (``method.md``), alternating (i) reduced-rank regression of z - s on y and (ii) the
    z-step, from the linear solution. Symmetric when ``target`` is ``y``. A phase of the schedule ends early when
    the true error, measured every 5 iterations, falls by less than ``tolerance`` (relative); None never stops.
    The result is the map with the smallest true error measured, so it is never worse than the linear start.

    Step (i) needs the leading eigenvectors of a matrix that hardly moves between iterations. A step of orthogonal
    iteration from the previous ones never raises the relaxed error (the trace they capture cannot fall) and costs
    a fraction of an eigendecomposition; the last iteration of a phase that runs to its end is exact.

    Cost an iteration: n d (d + 2 rank) multiply-adds, the z-step and O(d^2 rank). A GPU never waits: whether to stop
    is decided by an error one iteration old, and the device keeps the best map.
    """
    space = space or ResponseSpace.anywhere(y)
    x = space.coordinates(y)
    sums = Sums.of(target if addend is None else target - addend, y, x)
    regressor = Regressor.with_moments(sums.moments, x, space)
    descent = Descent(target, y, rank, activation, regressor, sums, addend=addend)
    best = _Best(descent.current)
    looks: list[Number] = []
    for weight, iterations in SCHEDULE:
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
    regressor's coordinates, into the next.

    ``quick``, for a caller that watches the error: each regression is on sums that go on in the direction they moved
    (Nesterov's momentum), which takes half as many steps, and a CPU multiplies in bfloat16 where it can. That rounds
    the difference z - y, row by row, and averages out over the rows.
    """

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
        quick: bool = False,
    ):
        """``sums``: of the regression of target - addend on ``y``."""
        self._target, self._y, self._addend, self._activation = target, y, addend, activation
        self._rank, self._sums, self._quick = rank, sums, quick
        self._activated = activation(target)
        # Products with x are taken centred: subtracting the mean's share afterwards would leave its rounding behind.
        self._centred = regressor.coordinates - regressor.mean.to(y.dtype)
        self._half = quick and multiplies_bfloat16(y)
        if self._half:
            self._centred = self._centred.to(torch.bfloat16)
        self._start(regressor)

    def restarted(self, regressor: Regressor) -> Descent:
        """A new descent on the same samples, with a regressor that differs in its ridge."""
        other = copy(self)
        other._start(regressor)
        return other

    def _start(self, regressor: Regressor) -> None:
        self.regressor = regressor
        self.current = linear(self._sums, self._rank, regressor, self._y.dtype)
        self.iterations = 0
        self._u = regressor.directions(self.current)
        self._before: tuple[Tensor, Tensor] | None = None  # the sums of the sweep before

    def sweep(self, weight: float, *, measure: bool) -> Tensor:
        """The z-step of every sample. Returns the true squared error of ``current`` (float64), or 0 unless
        ``measure``."""
        with quick_products(self._y.device):
            return self._sweep(weight, measure=measure)

    def _sweep(self, weight: float, *, measure: bool) -> Tensor:
        """One pass over the samples: sum (z - s - y)(x - mean)^T (``_by_x``) and sum (z - s - y) (``_total``).

        z is never stored: a chunk is made in a reused buffer, used and dropped while it is in cache. Products and the
        sums of a few chunks are in the dtype of the samples (the difference z - y is small), the rest in float64.
        """
        current, y, x, addend = self.current, self._y, self.regressor.coordinates, self._addend
        width = y.shape[1]
        self._by_x = torch.zeros(width, x.shape[1], dtype=torch.float64, device=y.device)
        self._total = torch.zeros(width, dtype=torch.float64, device=y.device)
        squared = torch.zeros((), dtype=torch.float64, device=y.device)
        partial = torch.zeros(width, x.shape[1], dtype=y.dtype, device=y.device)
        spans = list(chunks(len(y), y.device))
        hidden_buffer = y.new_empty(spans[0].stop, current.q.shape[1])
        v_buffer = y.new_empty(spans[0].stop, width)
        expand = current.p.T.contiguous()
        half = current.half(self.regressor.mean) if self._half else None
        for index, rows in enumerate(spans, 1):
            size = rows.stop - rows.start
            if half is not None:
                v = torch.add(self._centred[rows] @ half.q @ half.p, half.b, out=v_buffer[:size])
            else:
                hidden = torch.mm(x[rows], current.q, out=hidden_buffer[:size])
                v = torch.addmm(current.b, hidden, expand, out=v_buffer[:size])
            if addend is not None:
                v += addend[rows]
            if measure:
                squared += _squared_distance(self._activation(v), self._activated[rows])
            difference = self._activation.z_step(self._target[rows], self._activated[rows], v, weight).sub_(y[rows])
            if addend is not None:
                difference -= addend[rows]
            if half is not None:
                partial += difference.to(torch.bfloat16).T @ self._centred[rows]
            else:
                partial.addmm_(difference.T, self._centred[rows])
            self._total += difference.sum(0)
            if index % FLUSH_EVERY == 0 or index == len(spans):
                self._by_x += partial
                partial.zero_()
        return squared

    def advance(self, *, exact: bool = False) -> None:
        """The regression on the z of the last sweep; ``exact``: with its own eigenvectors."""
        if self._quick:
            self._go_on()
        a = self.regressor.whitened(self._by_x)
        self._u = leading_subspace(a, self._u.shape[1]) if exact else _advance(a, self._u)
        count = len(self._y)
        z_mean = self._sums.y / count + self._total / count
        self.current = self.regressor.solution(self._u, self._by_x, z_mean, self._y.dtype)
        self.iterations += 1

    def _go_on(self) -> None:
        """Move the sums by k / (k + 3) of the step they have made, in the k-th step."""
        now = self._by_x, self._total
        if self._before is not None:
            share = self.iterations / (self.iterations + 3)
            self._by_x, self._total = (
                torch.lerp(old, new, 1 + share) for old, new in zip(self._before, now, strict=True)
            )
        self._before = now

    def squared_error(self, rows: slice = slice(None)) -> Tensor:
        """Of ``current``, on all samples or on some."""
        addend = None if self._addend is None else self._addend[rows]
        x = self.regressor.coordinates[rows]
        return squared_error(self.current, self._activated[rows], x, addend, self._activation)

    def squared_size(self, rows: slice) -> Tensor:
        """sum ||r(t)||^2 of these samples, float64."""
        norm: Tensor = torch.linalg.vector_norm(self._activated[rows], dtype=torch.float64)
        return norm.square()


class Number:
    """A number on its way from a device. ``read`` waits for the work given to the device before it, not after it."""

    def __init__(self, value: Tensor):
        self._event: torch.cuda.Event | None = None
        self._value = value
        if value.device.type == "cuda":
            self._value = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(value.device))

    def read(self) -> float:
        if self._event is not None:
            self._event.synchronize()
        return float(self._value)


class _Best:
    """The map with the smallest error so far. The device compares them: nothing waits for it."""

    def __init__(self, first: LowRank):
        self.map = first
        self._error = torch.full((), math.inf, dtype=torch.float64, device=first.p.device)

    def offer(self, new: LowRank, squared: Tensor) -> None:
        better, old = squared < self._error, self.map
        self.map = LowRank(*(torch.where(better, *pair) for pair in ((new.p, old.p), (new.q, old.q), (new.b, old.b))))
        self._error = torch.where(better, squared, self._error)


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
    makes them so for a few products: a QR takes five times longer on a GPU. Where columns are nearly dependent (a wide
    spectrum draws all of them to its largest direction) that factor is inexact by the square of their condition. A
    second one repairs that; where it cannot, the step is not made. ``tiny`` is far below every eigenvalue seen and
    keeps columns in unseen directions from vanishing. Columns that span everything cannot turn.
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
