"""Ranks where some layers hand their 1 x 1 factor on to the next (see ``network.links``)."""

from __future__ import annotations

from leanconv.errors import LeanconvError
from leanconv.forms import Choices, Scheme
from leanconv.ranks.candidates import Candidate
from leanconv.ranks.select import WINDOW, Merit, Search, cheapest, log_energy, select

# (giver, taker): the giver's 1 x 1 factor can be taken into the taker's filters.
Pairs = list[tuple[str, str]]


def active(plan: Choices, pairs: Pairs) -> Pairs:
    """The pairs that have something to hand on: the giver is factorised and ends in 1 x 1 filters."""
    return [pair for pair in pairs if pair[0] in plan and plan[pair[0]].form.pointwise_end]


def macs_after(candidates: dict[str, Candidate], plan: Choices, pairs: Pairs) -> dict[str, int]:
    """MACs of every candidate once the ``pairs``, all active, are merged."""
    macs = {name: candidate.macs(plan.get(name)) for name, candidate in candidates.items()}
    for giver, taker in pairs:
        rank = plan[giver].ranks[-1]
        given, taken = candidates[giver], candidates[taker]
        macs[giver] -= rank * given.cost.expand
        # The taker's first filters, all of them or those of its factor, see ``rank`` channels instead of d.
        choice = plan.get(taker)
        first = taken.cost.dense if choice is None else choice.form.first_macs(taken.cost, choice.ranks)
        macs[taker] -= first // taken.geometry.in_channels * (taken.geometry.in_channels - rank)
    return macs


def reachable(candidates: list[Candidate], pairs: Pairs, *, fixed: int, scheme: Scheme) -> float:
    """The largest speed-up there is: every layer at its cheapest, and merged."""
    before = fixed + sum(candidate.cost.dense for candidate in candidates)
    return before / (before - _most_saved(candidates, pairs, scheme)[0])


def _most_saved(candidates: list[Candidate], pairs: Pairs, scheme: Scheme) -> tuple[int, int]:
    """MACs saved with every layer at its cheapest: in all, and by merging alone."""
    by_name = {candidate.name: candidate for candidate in candidates}
    chosen = {candidate.name: cheapest(candidate, scheme) for candidate in candidates}
    plan = {name: choice for name, choice in chosen.items() if choice is not None}
    merged = sum(macs_after(by_name, plan, active(plan, pairs)).values())
    alone = sum(candidate.macs(plan.get(candidate.name)) for candidate in candidates)
    return sum(candidate.cost.dense for candidate in candidates) - merged, alone - merged


def select_merged(
    candidates: list[Candidate],
    pairs: Pairs,
    *,
    fixed: int,
    speedup: float,
    scheme: Scheme,
    search: Search,
    merit: Merit = log_energy,
) -> tuple[Choices, Pairs]:
    """A plan that meets ``speedup`` to within two percent with what merging saves counted, and the pairs to merge.

    What is saved depends on the plan and the plan on what is saved, so the two are found in turn. Where that does
    not settle (few filters, coarse ranks), nothing is merged.
    """
    by_name = {candidate.name: candidate for candidate in candidates}
    before = fixed + sum(candidate.cost.dense for candidate in candidates)

    def choose(saved: int) -> Choices:
        return select(candidates, fixed=fixed, saved=saved, speedup=speedup, scheme=scheme, search=search, merit=merit)

    refused: LeanconvError | None = None
    saved, plain = 0, None
    try:
        plain = plan = choose(0)
    except LeanconvError as error:
        # It may take merging to get there.
        refused, saved = error, _most_saved(candidates, pairs, scheme)[1]
        plan = {}
    for attempt in range(12 if pairs else 0):
        used = active(plan, pairs)
        after = fixed + sum(macs_after(by_name, plan, used).values())
        if plan and speedup <= before / after < WINDOW * speedup:
            return plan, used
        if plan:
            found = fixed + sum(by_name[name].macs(plan.get(name)) for name in by_name) - after
            saved = found if attempt < 4 else (saved + found) // 2  # two plans may take turns
        try:
            plan = choose(saved)
        except LeanconvError:  # ranks too coarse for what is left to save
            break
    if plain is None:
        assert refused is not None
        raise refused
    return plain, []
