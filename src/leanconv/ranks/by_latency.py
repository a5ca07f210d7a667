"""Ranks under a budget of time: of the forms a layer was timed in, those that keep most energy together.

The 3d form has two ranks, and the energies of responses (d') and of filters (d'') do not compare. As in the selection
by multiply-accumulates, both halves of it are to save the same factor t: that says which d' goes with which d'', and so
what a d'' is worth in the layer's response energy. A form counts as the smaller d' of the two, so that all layers and
forms compare in one scale; one that cuts on one side only is as good as the other side allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leanconv.ranks.candidates import Candidate, Choice, Energies, Plan
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


def select_timed(candidates: Sequence[Candidate], tables: Tables, budget: float) -> Plan:
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


def best_at(candidates: Sequence[Candidate], tables: Tables, budget: float, factor: float) -> Plan:
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


def _channel_factor(candidates: Sequence[Candidate], plan: Plan) -> float:
    """What the ranks d' of a plan save alone, in multiply-accumulates."""
    before = sum(one.cost.dense for one in candidates)
    after = 0
    for one in candidates:
        rank = reach(one, plan.get(one.name))[1]
        after += min(one.cost.dense, one.cost.channel(rank))
    return before / max(after, 1)


def reach(candidate: Candidate, choice: Choice | None) -> tuple[int, int]:
    """(d'', d') of a form, the full ranks where it does not cut."""
    full = candidate.geometry.spatial_limit, candidate.geometry.channel_limit
    if choice is None:
        return full
    if choice.scheme == "channel":
        return full[0], choice.ranks[0]
    if choice.scheme == "spatial":
        return choice.ranks[0], full[1]
    return choice.ranks[0], choice.ranks[1]


def undominated(candidate: Candidate, table: Sequence[Timed]) -> list[Timed]:
    """Without the forms that another one matches in both ranks and is no slower than: a larger rank that costs nothing
    is taken. The fewer factors, the better, where all is equal."""

    def order(timed: Timed) -> tuple[float, int, int, int]:
        spatial, channel = reach(candidate, timed.choice)
        return timed.ms, -spatial, -channel, len(timed.choice.ranks) if timed.choice else 0

    kept: list[Timed] = []
    for timed in sorted(table, key=order):
        own = reach(candidate, timed.choice)
        others = (reach(candidate, other.choice) for other in kept)
        if not any(other[0] >= own[0] and other[1] >= own[1] for other in others):
            kept.append(timed)
    return kept


def merit(candidate: Candidate, choice: Choice | None, factor: float) -> float:
    """Log of the energy kept at the d' that both ranks of ``choice`` allow: its own, and the one its d'' goes with."""
    spatial, channel = reach(candidate, choice)
    if candidate.channel is None:  # the spatial scheme alone: filters are all there is to compare
        return _log_kept(candidate.spatial, spatial)
    cut = spatial < candidate.geometry.spatial_limit
    return _log_kept(candidate.channel, min(channel, partner(candidate, spatial, factor)) if cut else channel)


def partner(candidate: Candidate, spatial: int, factor: float) -> float:
    """The d' for which (k x 1, d'') and (1 x k, d') cost 1 / ``factor`` of k x k filters, d' of them."""
    cost = candidate.cost
    rest = cost.reduce - spatial * factor * cost.horizontal
    limit = candidate.geometry.channel_limit
    return limit if rest <= 0 else min(limit, spatial * factor * cost.vertical / rest)


def _log_kept(energies: Energies | None, rank: float) -> float:
    """Between two ranks in proportion."""
    if energies is None:
        return 0.0
    below = math.floor(rank)
    kept = energies.kept[below]
    if below < rank:
        kept += (rank - below) * (energies.kept[below + 1] - kept)
    return math.log(max(kept, 1e-300))
