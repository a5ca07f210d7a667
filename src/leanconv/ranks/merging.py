"""Ranks where the 1 x 1 factor of a layer may be merged into the next layer (see ``network.links``)."""

from __future__ import annotations

from dataclasses import dataclass

from leanconv.errors import LeanconvError
from leanconv.forms import Choices, Scheme
from leanconv.ranks.candidates import Candidate
from leanconv.ranks.select import WINDOW, Merit, Search, cheapest, log_energy, select

# (giver, taker): the giver's 1 x 1 factor can be taken into the taker's filters.
Pairs = list[tuple[str, str]]


def active(plan: Choices, pairs: Pairs) -> Pairs:
    """The pairs that can be merged: the giver is factorised and ends in 1 x 1 filters."""
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


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What ranks are chosen for."""

    scheme: Scheme
    candidates: tuple[Candidate, ...]  # in the order ranks are chosen in
    pairs: Pairs  # of layers that may be merged
    fixed: int  # MACs of the layers that are counted but are no candidates

    @property
    def reachable(self) -> float:
        """The largest possible speed-up: every layer at its cheapest, and merged."""
        return self._before / (self._before - self._most_saved()[0])

    def select(self, speedup: float, search: Search = "greedy", merit: Merit = log_energy) -> tuple[Choices, Pairs]:
        """A plan that meets ``speedup`` to within two percent, savings by merging counted, and the pairs to merge.

        The savings depend on the plan and the plan on the savings, so both are computed in turns. Where that does not
        settle (few filters, coarse ranks), nothing is merged.
        """
        candidates, by_name = list(self.candidates), {one.name: one for one in self.candidates}

        def choose(saved: int) -> Choices:
            return select(
                candidates,
                fixed=self.fixed,
                saved=saved,
                speedup=speedup,
                scheme=self.scheme,
                search=search,
                merit=merit,
            )

        refused: LeanconvError | None = None
        saved, plain = 0, None
        try:
            plain = plan = choose(0)
        except LeanconvError as error:
            # Perhaps only merging gets there.
            refused, saved, plan = error, self._most_saved()[1], {}
        for attempt in range(12 if self.pairs else 0):
            used = active(plan, self.pairs)
            after = self.fixed + sum(macs_after(by_name, plan, used).values())
            if plan and speedup <= self._before / after < WINDOW * speedup:
                return plan, used
            if plan:
                merged = self.fixed + sum(one.macs(plan.get(one.name)) for one in candidates) - after
                saved = merged if attempt < 4 else (saved + merged) // 2  # two plans may take turns
            try:
                plan = choose(saved)
            except LeanconvError:  # ranks too coarse for what is left to save
                break
        if plain is None:
            assert refused is not None
            raise refused
        return plain, []

    @property
    def _before(self) -> int:
        return self.fixed + sum(candidate.cost.dense for candidate in self.candidates)

    def _most_saved(self) -> tuple[int, int]:
        """MACs saved with every layer at its cheapest: in all, and by merging alone."""
        by_name = {candidate.name: candidate for candidate in self.candidates}
        chosen = {candidate.name: cheapest(candidate, self.scheme) for candidate in self.candidates}
        plan = {name: choice for name, choice in chosen.items() if choice is not None}
        merged = sum(macs_after(by_name, plan, active(plan, self.pairs)).values())
        alone = sum(candidate.macs(plan.get(candidate.name)) for candidate in self.candidates)
        return sum(candidate.cost.dense for candidate in self.candidates) - merged, alone - merged
