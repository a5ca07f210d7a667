"""How many samples a layer needs: by the error of linear fits to more and more samples on unseen images (``enough``),
or by two errors on the same rows, of a fit that has seen them and one that has not (``Gap``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from leanconv.solve.holdout import Parts
from leanconv.solve.moments import Sums, chunks
from leanconv.solve.reduced_rank import Regressor, linear
from leanconv.solve.response_space import ResponseSpace

# Twice the samples help if they lower the error on unseen images by this share of it.
TOLERANCE = 0.01

# A relative error below this needs no improvement; rounding and pseudo-samples are part of it.
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
    """``rows`` to fit to, of all. ``curve``: pairs of fitted rows and relative error on held-out rows, as far as
    measured. ``enough``: whether twice as many as ``rows`` hardly help; if not, ``rows`` are all."""

    rows: int
    curve: tuple[tuple[int, float], ...]
    enough: bool

    def times(self, factor: float, most: int) -> Enough:
        """``factor`` times as many rows, up to ``most``."""
        rows = round(factor * self.rows)
        return replace(self, rows=min(rows, most), enough=self.enough and rows <= most)


def enough(regressions: Sequence[Regression], rank: int, parts: Parts) -> Enough | None:
    """The smallest share of the rows after which doubling lowers the held-out error by less than ``TOLERANCE``.

    ``regressions`` share their rows, of which ``parts`` are, and their rank; their squared errors add up. Not under
    ``FEWEST_ROWS``; None where there are fewer.

    Every fit adds rows to the sums of the one before it: cost n m (d + m) multiply-adds and O(d^3) per fit, less if few
    rows are enough, as larger fits are not made then.
    """
    rows = len(regressions[0].y)
    if rows < FEWEST_ROWS:
        return None
    fitted, held = parts
    order = _drawn(len(fitted))
    size = sum(float(torch.linalg.vector_norm(one.z[held], dtype=torch.float64)) ** 2 for one in regressions)
    curve: list[tuple[int, float]] = []
    sums: list[Sums] = []
    for before, step in zip((0, *STEPS), STEPS, strict=False):
        more = [_sums(one, fitted[(order >= before) & (order < step)]) for one in regressions]
        sums = [one.joined(new) for one, new in zip(sums, more, strict=True)] if sums else more
        pairs = zip(regressions, sums, strict=True)
        error = (sum(_squared_error(*pair, rank, held) for pair in pairs) / size) ** 0.5 if size else 0.0
        curve.append((sums[0].moments.count, error))
        last = curve[-2][1] if before else float("inf")
        if last < NEGLIGIBLE or last - error < TOLERANCE * last:
            return Enough(max(rows * before // STEPS[-1], FEWEST_ROWS), tuple(curve), True)
    return Enough(rows, tuple(curve), False)


def thinned(rows: int, count: int) -> Tensor:
    """``count`` of the ``rows``, rising: one drawn from each of ``count`` runs. If rows are all positions of a map,
    rows at equal steps would be the same few columns of every image, its border among them."""
    edges = torch.arange(count + 1) * rows // count
    drawn = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return edges[:-1] + (drawn * edges.diff()).long()


def _drawn(rows: int) -> Tensor:
    """The places of each eight neighbours in a drawn order: those under k are k of each eight."""
    runs = -(-rows // STEPS[-1])
    order = torch.rand(runs, STEPS[-1], generator=torch.Generator().manual_seed(0)).argsort(dim=1)
    return order.flatten()[:rows]


def _sums(of: Regression, rows: Tensor) -> Sums:
    rows = rows.to(of.y.device)
    y = of.y[rows]
    return Sums.of(y if of.z is of.y else of.z[rows], y, of.space.at(rows).coordinates(y))


def _squared_error(of: Regression, sums: Sums, rank: int, held: Tensor) -> float:
    """Of the fit to the samples of ``sums``, on rows ``held`` out: sum ||z - (M x + b)||^2."""
    no_rows = torch.empty(0, len(of.space.prior), dtype=of.y.dtype)  # coordinates are computed chunk by chunk below
    fitted = linear(sums, rank, Regressor.with_moments(sums.moments, no_rows, of.space), of.y.dtype)
    total = 0.0
    for span in chunks(len(held), of.y.device):
        rows = held[span].to(of.y.device)
        left = fitted(of.space.at(rows).coordinates(of.y[rows])) - of.z[rows]
        total += float(torch.linalg.vector_norm(left, dtype=torch.float64)) ** 2
    return total


@dataclass(frozen=True)
class Gap:
    """Squared errors on rows held out: ``unseen``, of the fit to the ``fitted`` other rows, and ``seen``, of that to
    all ``rows``. ``size``: the squared norm of what is fitted there.

    A least-squares fit of p unknowns an output to n rows with noise s^2 has the squared error s^2 (1 - p / n) on these
    rows and, to first order in p / n, s^2 (1 + p / n) on others. On the same rows, with f of n fitted to,

        seen = s^2 (1 - p / n),  unseen = s^2 (1 + p / f),  so that
        s^2 = (n seen + f unseen) / (n + f),  s^2 p = (unseen - seen) n f / (n + f).

    What no map of the rank can fit counts as noise. Where rows of an image are alike, p is larger than the number of
    unknowns, and more rows are meant of as many more images. A ridge and stopping early hide unknowns from few rows:
    of a few dozen images p comes out too small.
    """

    rows: int
    fitted: int
    size: float
    seen: float
    unseen: float

    def __add__(self, other: Gap) -> Gap:
        """Of both together: groups, fitted to the same rows."""
        size, seen, unseen = (a + b for a, b in zip(astuple(self)[2:], astuple(other)[2:], strict=True))
        return Gap(self.rows, self.fitted, size, seen, unseen)

    @property
    def floor(self) -> float:
        """s^2: what is left with any number of rows."""
        return (self.rows * self.seen + self.fitted * self.unseen) / (self.rows + self.fitted)

    @property
    def slope(self) -> float:
        """s^2 p: the error of a fit to N rows on unseen ones is floor + slope / N."""
        return max(self.unseen - self.seen, 0.0) * self.rows * self.fitted / (self.rows + self.fitted)

    def error(self, rows: float) -> float:
        """Of a fit to so many, on unseen ones: relative, and a root."""
        return math.sqrt((self.floor + self.slope / rows) / self.size) if self.size else 0.0

    @property
    def needed(self) -> int | None:
        """About how many rows are enough: twice as many lower the (root) error by ``TOLERANCE``. Extrapolated from
        ``rows``; None where errors are not finite.

        floor + slope / 2N = q (floor + slope / N) with q = (1 - TOLERANCE)^2 gives N = p (q - 1/2) / (1 - q), 24 p.
        """
        error = self.error(self.rows)
        if not math.isfinite(error):
            return None
        if error < NEGLIGIBLE:
            return self.rows
        left = (1 - TOLERANCE) ** 2
        rows = self.slope / self.floor * (left - 0.5) / (1 - left)
        return max(math.ceil(rows), min(FEWEST_ROWS, self.rows))

    @property
    def enough(self) -> bool | None:
        """Whether twice the rows would hardly help."""
        return None if self.needed is None else self.needed <= self.rows
