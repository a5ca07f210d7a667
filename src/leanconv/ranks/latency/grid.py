"""Which forms of a layer are timed, and what is known of those between them. Numbers only."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from leanconv.network.layers.cost import Cost
from leanconv.network.layers.geometry import Geometry, Scheme
from leanconv.ranks.by_latency import Timed
from leanconv.ranks.candidates import Choice

# Forms that save less than this, or more than so many times what is asked for on the whole, are not timed.
LEAST_SAVED, FAR = 1.2, 4.0
# What the two one-way factors of the 3d form may save of k x k filters: both halves are to save alike.
SPATIAL_SAVED = (1.2, 4.5)
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
    channel = sizes(geometry.channel_limit)
    spatial = sizes(geometry.spatial_limit) if geometry.splits_spatially else []
    found: list[tuple[Choice, int]] = []
    if scheme != "spatial":
        found += [(Choice("channel", (rank,)), cost.channel(rank)) for rank in channel]
    if scheme != "channel":
        found += [(Choice("spatial", (rank,)), cost.spatial(rank)) for rank in spatial]
    if scheme == "3d":
        low, high = SPATIAL_SAVED
        for d2, d1 in itertools.product(spatial, channel):
            one_way = cost.both(d2, d1) - d1 * cost.expand
            if low <= d1 * cost.reduce / one_way <= high:
                found.append((Choice("3d", (d2, d1)), cost.both(d2, d1)))
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
    high = Choice(low.scheme, (end,))
    if start < EVEN or start % UNIT or high not in known:
        return {}
    return {
        Choice(low.scheme, (rank,)): _mix(known[low], known[high], (rank - start) / (end - start))
        for rank in range(start + UNIT, end, UNIT)
    }


def _cell(known: Mapping[Choice | None, float], low: Choice) -> Times:
    """Between four 3d forms that stand at the corners of a cell of ``sizes``; a rank under EVEN stays as it is."""
    a, b = low.ranks
    found: Times = {}
    ends = [following(rank) if rank >= EVEN and rank % UNIT == 0 else rank for rank in (a, b)]
    corners = [Choice("3d", pair) for pair in itertools.product((a, ends[0]), (b, ends[1]))]
    if not all(corner in known for corner in corners):
        return {}
    w, x, y, z = (known[corner] for corner in corners)
    for d2, d1 in itertools.product(range(a, ends[0] + 1, UNIT), range(b, ends[1] + 1, UNIT)):
        across = (d1 - b) / (ends[1] - b) if ends[1] > b else 0.0
        along = (d2 - a) / (ends[0] - a) if ends[0] > a else 0.0
        found[Choice("3d", (d2, d1))] = _mix(_mix(w, x, across), _mix(y, z, across), along)
    return found


def following(size: int) -> int:
    """The next larger one of ``sizes``.

    >>> [following(size) for size in (7, 8, 28, 48, 224)]
    [8, 10, 32, 56, 256]
    """
    return size + max(1, (1 << (size.bit_length() - 1)) // 4)


def _mix(low: float, high: float, share: float) -> float:
    return low + share * (high - low)
