"""Which forms of a layer are timed, and what is known of those between them. Numbers only."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from leanconv.forms import RESPONSES, Choice, Scheme
from leanconv.network.layers.geometry import Cost, Geometry
from leanconv.ranks.by_latency import Timed

# Forms that save less than this, or more than so many times what is asked for on the whole, are not timed.
LEAST_SAVED, FAR = 1.2, 4.0
# What the factors of a form with two ranks may save of k x k filters, but for the last: both halves are to save alike.
HALF_SAVED = (1.2, 4.5)
# From EVEN on all sizes timed are multiples of UNIT, so times between two of them may be taken in proportion: below,
# and off those multiples, they go in steps.
UNIT, EVEN = 16, 64

Times = dict[Choice | None, float]  # milliseconds; None is the layer as it is


def sizes(limit: int) -> list[int]:
    """Ranks to time: all up to 8, then four in every doubling.

    >>> sizes(70)
    [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    """
    found = [rank for rank in range(1, 8) if rank <= limit]
    base = 8
    while base <= limit:
        found += [rank for rank in (base, base * 5 // 4, base * 3 // 2, base * 7 // 4) if rank <= limit]
        base *= 2
    return found


def forms(geometry: Geometry, cost: Cost, scheme: Scheme, speedup: float) -> list[Choice]:
    """The forms of one layer worth timing for a network that is to be ``speedup`` times faster."""
    found: list[tuple[Choice, int]] = []
    for form in scheme.applicable(geometry):
        for ranks in itertools.product(*(sizes(limit) for limit in form.limits(geometry))):
            macs = form.macs(cost, ranks)
            if len(ranks) > 1 and form.axes[-1] is RESPONSES:
                low, high = HALF_SAVED
                if not low <= ranks[-1] * cost.reduce / (macs - ranks[-1] * cost.expand) <= high:
                    continue
            found.append((Choice(form, ranks), macs))
    return [choice for choice, macs in found if LEAST_SAVED <= cost.dense / max(macs, 1) <= FAR * speedup]


@dataclass
class LayerTimes:
    """Times of one layer's forms, for one image or a batch of them."""

    geometry: Geometry
    known: Times = field(default_factory=dict)

    def table(self) -> list[Timed]:
        """Every form that was timed, and those between forms that were."""
        return [Timed(choice, ms) for choice, ms in (self._between() | self.known).items()]

    def _between(self) -> Times:
        found: Times = {}
        for choice in self.known:
            if choice is not None:
                found |= _row(self.known, choice) if len(choice.ranks) == 1 else _cell(self.known, choice)
        return found


def _row(known: Mapping[Choice | None, float], low: Choice) -> Times:
    """Between a form of one rank and the one with the next larger rank of ``sizes``."""
    (start,) = low.ranks
    end = following(start)
    high = Choice(low.form, (end,))
    if start < EVEN or start % UNIT or high not in known:
        return {}
    return {
        Choice(low.form, (rank,)): _mix(known[low], known[high], (rank - start) / (end - start))
        for rank in range(start + UNIT, end, UNIT)
    }


def _cell(known: Mapping[Choice | None, float], low: Choice) -> Times:
    """Between four forms of two ranks, the corners of a cell of ``sizes``; a rank under EVEN stays as it is."""
    a, b = low.ranks
    found: Times = {}
    ends = [following(rank) if rank >= EVEN and rank % UNIT == 0 else rank for rank in (a, b)]
    corners = [Choice(low.form, pair) for pair in itertools.product((a, ends[0]), (b, ends[1]))]
    if not all(corner in known for corner in corners):
        return {}
    w, x, y, z = (known[corner] for corner in corners)
    for d2, d1 in itertools.product(range(a, ends[0] + 1, UNIT), range(b, ends[1] + 1, UNIT)):
        across = (d1 - b) / (ends[1] - b) if ends[1] > b else 0.0
        along = (d2 - a) / (ends[0] - a) if ends[0] > a else 0.0
        found[Choice(low.form, (d2, d1))] = _mix(_mix(w, x, across), _mix(y, z, across), along)
    return found


def following(size: int) -> int:
    """The next larger one of ``sizes``.

    >>> [following(size) for size in (7, 8, 28, 48, 224)]
    [8, 10, 32, 56, 256]
    """
    return size + max(1, (1 << (size.bit_length() - 1)) // 4)


def _mix(low: float, high: float, share: float) -> float:
    return low + share * (high - low)
