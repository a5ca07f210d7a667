"""Ranks where some layers hand their 1 x 1 factor on to the next (see ``network.links``)."""

from __future__ import annotations

from leanconv.errors import LeanconvError
from leanconv.network.geometry import Scheme
from leanconv.ranks.candidates import Candidate, Plan
from leanconv.ranks.select import WINDOW, Method, select

# (giver, taker): the giver's 1 x 1 factor can be taken into the taker's filters.
Pairs = list[tuple[str, str]]


def active(plan: Plan, pairs: Pairs) -> Pairs:
    """The pairs that have something to hand on: the giver is factorised and ends in 1 x 1 filters."""
    return [pair for pair in pairs if pair[0] in plan and plan[pair[0]].scheme != "spatial"]


def macs_after(candidates: dict[str, Candidate], plan: Plan, pairs: Pairs) -> dict[str, int]:
    """MACs of every candidate once the ``pairs``, all active, are merged."""
    macs = {name: candidate.macs(plan.get(name)) for name, candidate in candidates.items()}
    for giver, taker in pairs:
        rank = plan[giver].ranks[-1]
        given, taken = candidates[giver], candidates[taker]
        macs[giver] -= rank * given.cost.expand
        # The taker's first filters, all of them or those of its factor, see ``rank`` channels instead of d.
        first = taken.cost.dense if taker not in plan else plan[taker].ranks[0] * taken.cost.reduce
        macs[taker] -= first // taken.geometry.in_channels * (taken.geometry.in_channels - rank)
    return macs


def select_merged(
    candidates: list[Candidate], pairs: Pairs, *, fixed: int, speedup: float, scheme: Scheme, method: Method
) -> tuple[Plan, Pairs]:
    """A plan that meets ``speedup`` to within two percent with what merging saves counted, and the pairs to merge.

    What is saved depends on the plan and the plan on what is saved, so the two are found in turn. Where that does
    not settle, nothing is merged.
    """
    by_name = {candidate.name: candidate for candidate in candidates}
    before = fixed + sum(candidate.cost.dense for candidate in candidates)

    def choose(saved: int) -> Plan:
        return select(candidates, fixed=fixed, saved=saved, speedup=speedup, scheme=scheme, method=method)

    plain = plan = choose(0)
    for _ in range(8 if pairs else 0):
        used = active(plan, pairs)
        after = fixed + sum(macs_after(by_name, plan, used).values())
        if speedup <= before / after < WINDOW * speedup:
            return plan, used
        unmerged = fixed + sum(by_name[name].macs(plan.get(name)) for name in by_name)
        try:
            plan = choose(unmerged - after)
        except LeanconvError:  # ranks too coarse for what is left to save
            break
    return plain, []
