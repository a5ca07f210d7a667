"""How many samples a layer needs: the error of its linear fit on images it has not seen, for more and more samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leanconv.solve.low_rank import LowRank
from leanconv.solve.moments import Moments, chunks
from leanconv.solve.parts import Parts
from leanconv.solve.reduced_rank import Regressor, leading_subspace
from leanconv.solve.space import ResponseSpace

# Twice the samples help where they lower the error on unseen images by this share of it.
TOLERANCE = 0.01

# Nobody needs a relative error under this one lowered; rounding and pseudo-samples have a share in it.
NEGLIGIBLE = 1e-3

# With fewer rows there is nothing to save.
FEWEST_ROWS = 2000

# Fits are to so many of each eight rows.
STEPS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Regression:
    """What is fitted: ``z`` from ``y``, both n x d, as ``reduced_rank`` does it; the symmetric case, PCA, where z is y.

    The unknowns are d x m: m = d, or the dimensions of a ``space`` with a basis, or the width of its inputs.
    """

    z: Tensor
    y: Tensor
    space: ResponseSpace


@dataclass(frozen=True)
class Enough:
    """``rows`` to fit to, of all. ``curve``: rows fitted to and relative error on those held out, as far as it was
    looked at. ``enough``: whether twice as many as ``rows`` hardly help; if not, these are all."""

    rows: int
    curve: tuple[tuple[int, float], ...]
    enough: bool

    def times(self, factor: float, most: int) -> Enough:
        """So many times as many, of ``most``."""
        wanted = round(factor * self.rows)
        return replace(self, rows=min(wanted, most), enough=self.enough and wanted <= most)


def enough(regressions: Sequence[Regression], rank: int, parts: Parts) -> Enough | None:
    """The smallest share of the rows after which doubling lowers the held-out error by less than ``TOLERANCE``.

    ``regressions`` share their rows, of which ``parts`` are, and their rank; their squared errors add up. Not under
    ``FEWEST_ROWS``; None where there are fewer.

    Every fit has the rows of the one before it, whose sums go on: cost n m (d + m) multiply-adds and O(d^3) a
    fit, less where few are enough: larger fits are not made then.
    """
    rows = len(regressions[0].y)
    if rows < FEWEST_ROWS:
        return None
    fitted, held = parts
    order = _drawn(len(fitted))
    fits = [_Sums(one, fitted[order < STEPS[0]]) for one in regressions]
    size = sum(float(torch.linalg.vector_norm(one.z[held], dtype=torch.float64)) ** 2 for one in regressions)
    curve: list[tuple[int, float]] = []
    for before, step in zip((0, *STEPS), STEPS, strict=False):
        new = fitted[(order >= before) & (order < step)]
        for one in fits:
            one.add(new)
        error = (sum(one.squared_error(rank, held) for one in fits) / size) ** 0.5 if size else 0.0
        curve.append((fits[0].count, error))
        last = curve[-2][1] if before else float("inf")
        if last < NEGLIGIBLE or last - error < TOLERANCE * last:
            return Enough(max(rows * before // STEPS[-1], FEWEST_ROWS), tuple(curve), True)
    return Enough(rows, tuple(curve), False)


def thinned(rows: int, count: int) -> Tensor:
    """``count`` of the ``rows``, rising: one, drawn, of each of as many runs. Every so many-th would be, where rows are
    all positions of a map, the same few columns of each image, its border among them."""
    edges = torch.arange(count + 1) * rows // count
    drawn = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return edges[:-1] + (drawn * edges.diff()).long()


def _drawn(rows: int) -> Tensor:
    """The places of each eight neighbours in a drawn order: those under k are k of each eight."""
    runs = -(-rows // STEPS[-1])
    order = torch.rand(runs, STEPS[-1], generator=torch.Generator().manual_seed(0)).argsort(dim=1)
    return order.flatten()[:rows]


class _Sums:
    """Sums over samples that a reduced-rank regression is made of, taken around the mean of the ``first`` ones: what
    the mean of more is away from it is small, and is subtracted without loss of digits."""

    def __init__(self, regression: Regression, first: Tensor):
        self._of = regression
        like = regression.y
        d, m = like.shape[1], len(regression.space.prior)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=like.device)

        self.count = 0
        self._x, self._z, self._difference = zeros(m), zeros(d), zeros(d)
        self._xx, self._difference_by_x = zeros(m, m), zeros(d, m)
        centre = zeros(m)
        for rows in self._chunks(first):
            centre += self._coordinates(rows).sum(0, dtype=torch.float64)
        self._centre = (centre / len(first)).to(like.dtype)

    def add(self, rows: Tensor) -> None:
        """Sums of chunks are in float64; products of the short chunks of a CPU in the dtype of the samples."""
        z, y = self._of.z, self._of.y
        for part in self._chunks(rows):
            x = self._coordinates(part) - self._centre
            self._x += x.sum(0, dtype=torch.float64)
            exact = x if x.device.type == "cpu" else x.to(torch.float64)
            self._xx += exact.T @ exact
            wanted = z[part]
            self._z += wanted.sum(0, dtype=torch.float64)
            if z is not y:
                difference = wanted - y[part]
                self._difference += difference.sum(0, dtype=torch.float64)
                self._difference_by_x += difference.T @ x
        self.count += len(rows)

    def squared_error(self, rank: int, held: Tensor) -> float:
        """Of the fit to all rows added, on rows ``held`` out: sum ||z - (M x + b)||^2."""
        fitted, total = self._fit(rank), 0.0
        for rows in self._chunks(held):
            left = fitted(self._coordinates(rows)) - self._of.z[rows]
            total += float(torch.linalg.vector_norm(left, dtype=torch.float64)) ** 2
        return total

    def _fit(self, rank: int) -> LowRank:
        """A map of the coordinates x, as ``linear_start`` makes it."""
        space, dtype, n = self._of.space, self._of.y.dtype, self.count
        mean = self._centre.to(torch.float64) + self._x / n
        moments = Moments(n, mean, self._xx - torch.outer(self._x, self._x) / n)
        nobody = torch.empty(0, len(mean), dtype=dtype)  # coordinates are made where they are looked at
        regressor = Regressor.with_moments(moments, nobody, space)
        by_x = self._difference_by_x - torch.outer(self._difference, self._x) / n
        u = leading_subspace(regressor.whitened(by_x), rank)
        return regressor.solution(u, by_x, self._z / n, dtype)

    def _coordinates(self, rows: Tensor) -> Tensor:
        return self._of.space.at(rows).coordinates(self._of.y[rows])

    def _chunks(self, rows: Tensor) -> list[Tensor]:
        device = self._of.y.device
        return [rows[span].to(device) for span in chunks(len(rows), device)]
