"""Whether more samples would help, by two errors on the same rows: of a fit that has seen them and one that has not."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

from leanconv.solve.sample_size import FEWEST_ROWS, NEGLIGIBLE, TOLERANCE


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
        """About how many rows are enough: of which twice as many lower the (root) error by ``TOLERANCE``; extrapolated
        from ``rows``. None where errors are no numbers.

        floor + slope / 2N = q (floor + slope / N) with q = (1 - TOLERANCE)^2 gives N = p (q - 1/2) / (1 - q), 24 p.
        """
        error = self.error(self.rows)
        if not math.isfinite(error):
            return None
        if error < NEGLIGIBLE:
            return self.rows
        left = (1 - TOLERANCE) ** 2
        found = self.slope / self.floor * (left - 0.5) / (1 - left)
        return max(math.ceil(found), min(FEWEST_ROWS, self.rows))

    @property
    def enough(self) -> bool | None:
        """Whether twice the rows would hardly help."""
        return None if self.needed is None else self.needed <= self.rows
