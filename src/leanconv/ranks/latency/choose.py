"""Ranks under a budget of time: which forms of a layer are timed, and which of these keep most energy together.

Forms with two ranks cut responses (d') and filters (d''), and the energies of the two do not compare. As in the
selection by multiply-accumulates, both halves of such a form save the same factor t. So every d'' has a d' that goes
with it, and with this d' a value in the layer's response energy. A form counts as the smaller d' of the two: all layers
and forms compare on one scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from leanconv.forms import RESPONSES, Axis, Choice, Choices, Form, Scheme
from leanconv.network.layers.geometry import Cost, Geometry
from leanconv.ranks.candidates import Candidate, Energies
from leanconv.ranks.search_forms import Option, best_in_window

# Costs are whole numbers to the search: nanoseconds.
UNITS = 1_000_000
# Factors t that are tried: 1 + n / STEPS.
STEPS, MOST = 20, 200


# Milliseconds of every form of a layer; None is the layer as it is.
Times = dict[Choice | None, float]


def select_timed(candidates: Sequence[Candidate], tables: Mapping[str, Times], budget: float) -> Choices:
    """A plan of at most ``budget`` milliseconds for all candidates, from the forms that have a time; the fastest plan
    where that is too little.

    For every t there is a best plan. The right t is the one at which the ranks d' of the plan save that factor
    themselves. O(layers * forms) for each t; a bisection tries few.
    """
    useful = {one.name: undominated(one, tables[one.name]) for one in candidates}
    low, high = 0, MOST  # the channel half saves more than t at low, at most t at high
    while high - low > 1:
        middle = (low + high) // 2
        factor = 1 + middle / STEPS
        if _channel_factor(candidates, best_at(candidates, useful, budget, factor)) > factor:
            low = middle
        else:
            high = middle
    return best_at(candidates, useful, budget, 1 + high / STEPS)


def best_at(candidates: Sequence[Candidate], tables: Mapping[str, Times], budget: float, factor: float) -> Choices:
    """The plan with the largest product of energies for one t, in the time there is."""
    options = [
        [Option(choice, math.ceil(UNITS * ms), merit(one, choice, factor)) for choice, ms in tables[one.name].items()]
        for one in candidates
    ]
    fastest = sum(min(option.cost for option in layer) for layer in options)
    picked = best_in_window(options, -1, max(math.floor(UNITS * budget), fastest))
    assert picked is not None  # the fastest forms fit
    return {one.name: option.choice for one, option in zip(candidates, picked, strict=True) if option.choice}


def _channel_factor(candidates: Sequence[Candidate], plan: Choices) -> float:
    """What the ranks d' of a plan save alone, in multiply-accumulates."""
    before = sum(one.cost.dense for one in candidates)
    after = 0
    for one in candidates:
        after += min(
            one.cost.dense, reach(one, plan.get(one.name), (RESPONSES,))[0] * (one.cost.reduce + one.cost.expand)
        )
    return before / max(after, 1)


def reach(candidate: Candidate, choice: Choice | None, axes: Sequence[Axis]) -> tuple[int, ...]:
    """The ranks of a form along ``axes``, the full ones where it does not cut."""
    if choice is None:
        return tuple(axis.limit(candidate.geometry) for axis in axes)
    return tuple(choice.form.rank_on(axis, candidate.geometry, choice.ranks) for axis in axes)


def undominated(candidate: Candidate, times: Times) -> Times:
    """The forms that no other form dominates: at least as fast, with ranks at least as large. A larger rank that takes
    no more time is always better. Where all is equal, the form with fewer factors stays."""
    forms = dict.fromkeys(choice.form for choice in times if choice is not None)
    # Filters first: of two forms as fast, the one with the larger filter rank comes first.
    axes = sorted(dict.fromkeys(axis for form in forms for axis in form.axes), key=lambda axis: axis is RESPONSES)
    ranks = {choice: reach(candidate, choice, axes) for choice in times}

    def order(choice: Choice | None) -> tuple[float, tuple[int, ...], int]:
        return times[choice], tuple(-rank for rank in ranks[choice]), len(choice.ranks) if choice else 0

    found: Times = {}
    for choice in sorted(times, key=order):
        if not any(all(a >= b for a, b in zip(ranks[other], ranks[choice], strict=True)) for other in found):
            found[choice] = times[choice]
    return found


def merit(candidate: Candidate, choice: Choice | None, factor: float) -> float:
    """Log of the energy kept at the d' that all ranks of ``choice`` allow: its own, and those its others go with."""
    responses = candidate.spectrum(RESPONSES)
    if responses is None:  # the spatial scheme alone: filters are all there is to compare
        return 0.0 if choice is None else candidate.log_energy(choice)
    allowed: float = reach(candidate, choice, (RESPONSES,))[0]
    if choice is not None:
        for axis, rank in zip(choice.form.axes, choice.ranks, strict=True):
            if axis is not RESPONSES and rank < axis.limit(candidate.geometry):
                allowed = min(allowed, partner(candidate, choice.form, rank, factor))
    return _log_kept(responses, allowed)


def partner(candidate: Candidate, form: Form, rank: int, factor: float) -> float:
    """The d' for which a form's factors before the last cost 1 / ``factor`` of k x k filters, d' of them. ``rank``: the
    first of the form."""
    cost, limit = candidate.cost, candidate.geometry.channel_limit
    # macs = rest of d' = 0 + d' * a unit of d'. A form that has no d' is looked at as if it had all of them.
    if form.axes[-1] is RESPONSES:
        at_none = form.macs(cost, (rank, 0))
        unit = form.macs(cost, (rank, 1)) - at_none - cost.expand
    else:
        at_none = form.first_macs(cost, (rank,))
        unit = (form.macs(cost, (rank,)) - at_none) // cost.filters
    rest = cost.reduce - factor * unit
    return limit if rest <= 0 else min(limit, factor * at_none / rest)


def _log_kept(energies: Energies, rank: float) -> float:
    """Between two ranks in proportion."""
    below = math.floor(rank)
    kept = energies.kept[below]
    if below < rank:
        kept += (rank - below) * (energies.kept[below + 1] - kept)
    return math.log(max(kept, 1e-300))


# Forms that save less than LEAST_SAVED, or more than FAR times the target, are not timed.
LEAST_SAVED, FAR = 1.2, 4.0
# What the factors of a form with two ranks, without the last one, may save of k x k filters: both halves save alike.
HALF_SAVED = (1.2, 4.5)
# From EVEN on all timed sizes are multiples of UNIT, and times between two of them are interpolated. Below, and off the
# multiples, times go in steps.
UNIT, EVEN = 16, 64


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


def interpolated(known: Times) -> Times:
    """The forms of a layer that were timed, and those between forms that were."""
    between: Times = {}
    for choice in known:
        if choice is not None:
            between |= _cell(known, choice)
    return between | known


def _cell(known: Times, low: Choice) -> Times:
    """The forms between neighbours in ``sizes``: between two forms of one rank, or four of two ranks. A rank under EVEN
    stays as it is."""
    ends = [following(rank) if rank >= EVEN and rank % UNIT == 0 else rank for rank in low.ranks]
    sides = list(zip(low.ranks, ends, strict=True))
    corners = [Choice(low.form, ranks) for ranks in itertools.product(*sides)]
    if not all(corner in known for corner in corners):
        return {}
    cell: Times = {}
    for ranks in itertools.product(*(range(start, end + 1, UNIT) for start, end in sides)):
        times = [known[corner] for corner in corners]
        # Neighbours in the list differ in the last rank: mix along this one first.
        for rank, (start, end) in zip(reversed(ranks), reversed(sides), strict=True):
            share = (rank - start) / (end - start) if end > start else 0.0
            times = [a + share * (b - a) for a, b in zip(times[::2], times[1::2], strict=True)]
        cell[Choice(low.form, ranks)] = times[0]
    return cell


def following(size: int) -> int:
    """The next larger one of ``sizes``.

    >>> [following(size) for size in (7, 8, 28, 48, 224)]
    [8, 10, 32, 56, 256]
    """
    return size + max(1, (1 << (size.bit_length() - 1)) // 4)
