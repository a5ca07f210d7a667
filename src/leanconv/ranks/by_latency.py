"""Ranks under a budget of time: of the forms a layer was timed in, those that keep most energy together.

Forms with two ranks cut responses (d') and filters (d''), and energies of the two do not compare. As in the selection
by multiply-accumulates, both halves of such a form are to save the same factor t: that says which d' goes with which
d'', and so what a d'' is worth in the layer's response energy. A form counts as the smaller d' of the two, so that all
layers and forms compare in one scale; one that cuts on one side only is as good as the other side allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leanconv.forms import RESPONSES, Axis, Choice, Choices, Form
from leanconv.ranks.candidates import Candidate, Energies
from leanconv.ranks.search_dynamic import Options, best_in_window

# Costs are whole numbers to the search: nanoseconds.
UNITS = 1_000_000
# Factors t that are tried: 1 + n / STEPS.
STEPS, MOST = 20, 200


@dataclass(frozen=True)
class Timed:
    """A form of a layer and its milliseconds; None is the layer as it is."""

    choice: Choice | None
    ms: float


Tables = Mapping[str, Sequence[Timed]]


def select_timed(candidates: Sequence[Candidate], tables: Tables, budget: float) -> Choices:
    """A plan of at most ``budget`` milliseconds, all candidates together; a form without a time is not chosen. Where
    that is too little for any, the fastest.

    For every t there is a best plan. The t that counts is the one at which the ranks d' found save that factor
    themselves. O(layers * forms) for each t that is tried, and a bisection tries few.
    """
    kept = {one.name: undominated(one, tables[one.name]) for one in candidates}
    low, high = 0, MOST  # the channel half saves more than t at the former, no more than t at the latter
    while high - low > 1:
        middle = (low + high) // 2
        factor = 1 + middle / STEPS
        if _channel_factor(candidates, best_at(candidates, kept, budget, factor)) > factor:
            low = middle
        else:
            high = middle
    return best_at(candidates, kept, budget, 1 + high / STEPS)


def best_at(candidates: Sequence[Candidate], tables: Tables, budget: float, factor: float) -> Choices:
    """The plan with the largest product of energies for one t, in the time there is."""
    options: list[Options] = [
        [(math.ceil(UNITS * timed.ms), merit(one, timed.choice, factor)) for timed in tables[one.name]]
        for one in candidates
    ]
    fastest = sum(min(cost for cost, _ in layer) for layer in options)
    picked = best_in_window(options, -1, max(math.floor(UNITS * budget), fastest))
    assert picked is not None  # the fastest forms fit
    chosen = {one.name: tables[one.name][number].choice for one, number in zip(candidates, picked, strict=True)}
    return {name: choice for name, choice in chosen.items() if choice is not None}


def _channel_factor(candidates: Sequence[Candidate], plan: Choices) -> float:
    """What the ranks d' of a plan save alone, in multiply-accumulates."""
    before = sum(one.cost.dense for one in candidates)
    after = 0
    for one in candidates:
        after += min(one.cost.dense, response_rank(one, plan.get(one.name)) * (one.cost.reduce + one.cost.expand))
    return before / max(after, 1)


def response_rank(candidate: Candidate, choice: Choice | None) -> int:
    """d' of a form, the full rank where it does not cut."""
    limit = candidate.geometry.channel_limit
    return limit if choice is None else choice.form.rank_on(RESPONSES, candidate.geometry, choice.ranks)


def reach(candidate: Candidate, choice: Choice | None, axes: Sequence[Axis]) -> tuple[int, ...]:
    """The ranks of a form along ``axes``, the full ones where it does not cut."""
    if choice is None:
        return tuple(axis.limit(candidate.geometry) for axis in axes)
    return tuple(choice.form.rank_on(axis, candidate.geometry, choice.ranks) for axis in axes)


def undominated(candidate: Candidate, table: Sequence[Timed]) -> list[Timed]:
    """Without the forms that another one matches in all ranks and is no slower than: a larger rank that costs nothing
    is taken. The fewer factors, the better, where all is equal."""
    forms = dict.fromkeys(timed.choice.form for timed in table if timed.choice is not None)
    # Filters first: of two forms as fast the one with more of these is looked at first.
    axes = sorted(dict.fromkeys(axis for form in forms for axis in form.axes), key=lambda axis: axis is RESPONSES)

    def order(timed: Timed) -> tuple[float, tuple[int, ...], int]:
        ranks = reach(candidate, timed.choice, axes)
        return timed.ms, tuple(-rank for rank in ranks), len(timed.choice.ranks) if timed.choice else 0

    kept: list[Timed] = []
    for timed in sorted(table, key=order):
        own = reach(candidate, timed.choice, axes)
        others = (reach(candidate, other.choice, axes) for other in kept)
        if not any(all(a >= b for a, b in zip(other, own, strict=True)) for other in others):
            kept.append(timed)
    return kept


def merit(candidate: Candidate, choice: Choice | None, factor: float) -> float:
    """Log of the energy kept at the d' that all ranks of ``choice`` allow: its own, and those its others go with."""
    responses = candidate.spectrum(RESPONSES)
    if responses is None:  # the spatial scheme alone: filters are all there is to compare
        return 0.0 if choice is None else candidate.log_energy(choice)
    allowed: float = response_rank(candidate, choice)
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
