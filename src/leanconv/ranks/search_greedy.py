"""A site's ranks as a ladder: one rung a rank, each with a cost and an energy. Both selections climb ladders."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from leanconv.ranks.candidates import Energies


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Ranks 1 .. ``limit`` costing ``base + rank * step``; above the price of the dense layer it stays dense."""

    name: str
    dense: int
    step: int
    base: int
    limit: int
    energies: Energies

    def price(self, rank: int) -> int:
        """What the factors cost, whether or not that pays."""
        return self.base + rank * self.step

    def cost(self, rank: int | None) -> int:
        return self.dense if rank is None else self.price(rank)

    def pays(self, rank: int) -> bool:
        return self.price(rank) < self.dense

    def up(self, rank: int | None) -> int | None:
        """The next rung: a rank more, or dense (None) where that would not pay."""
        if rank is None or rank + 1 > self.limit or not self.pays(rank + 1):
            return None
        return rank + 1

    def settle(self, rank: int) -> int | None:
        """``rank`` where its factors pay, else dense."""
        return rank if self.pays(rank) else None


Ranks = dict[str, int | None]


def total(ladders: list[Ladder], ranks: Ranks) -> int:
    return sum(ladder.cost(ranks[ladder.name]) for ladder in ladders)


def greedy(ladders: list[Ladder], budget: int) -> Ranks:
    """The paper's selection: from full rank, drop the eigenvalue with the smallest relative energy loss a MAC.

    Savings are counted a rank; the total counts a layer at its dense price until its factors pay, so the first
    steps down a ladder save nothing by themselves. O(sum of ranks * log layers).
    """
    ranks = {ladder.name: ladder.limit for ladder in ladders}
    spent = sum(min(ladder.dense, ladder.price(ladder.limit)) for ladder in ladders)
    heap = [(_loss_a_mac(ladder, ladder.limit), i) for i, ladder in enumerate(ladders) if ladder.limit > 1]
    heapq.heapify(heap)
    while spent > budget and heap:
        _, i = heapq.heappop(heap)
        ladder = ladders[i]
        rank = ranks[ladder.name]
        spent -= min(ladder.dense, ladder.price(rank)) - min(ladder.dense, ladder.price(rank - 1))
        ranks[ladder.name] = rank - 1
        if rank - 1 > 1:
            heapq.heappush(heap, (_loss_a_mac(ladder, rank - 1), i))
    return {ladder.name: ladder.settle(ranks[ladder.name]) for ladder in ladders}


def _loss_a_mac(ladder: Ladder, rank: int) -> float:
    return ladder.energies.loss(rank) / ladder.step


def uniform(ladders: list[Ladder], budget: int) -> Ranks:
    """Every layer the same speed-up: the largest common ratio cost / dense that stays within the budget."""

    def at(ratio: float) -> Ranks:
        return {ladder.name: ladder.settle(_rank_at(ladder, ratio)) for ladder in ladders}

    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if total(ladders, at(middle)) <= budget:
            low = middle
        else:
            high = middle
    return at(low)


def _rank_at(ladder: Ladder, ratio: float) -> int:
    rank = int((ratio * ladder.dense - ladder.base) / ladder.step)
    return max(1, min(rank, ladder.limit))


def fill(ladders: list[Ladder], ranks: Ranks, budget: int, *, by_energy: bool) -> Ranks:
    """Spend what a selection left over, a rung at a time, never over the budget.

    The next rung is the one that regains the most energy a MAC, or, for uniform ranks, the one of the layer that
    was cut most.
    """
    ranks = dict(ranks)
    slack = budget - total(ladders, ranks)
    while True:
        best: tuple[float, int, Ladder] | None = None
        for ladder in ladders:
            rank = ranks[ladder.name]
            if rank is None:
                continue
            extra = ladder.cost(ladder.up(rank)) - ladder.cost(rank)
            if extra > slack:
                continue
            if by_energy:
                merit = _loss_a_mac(ladder, min(rank + 1, ladder.limit))
            else:
                merit = ladder.dense / ladder.cost(rank)
            if best is None or merit > best[0]:
                best = (merit, extra, ladder)
        if best is None:
            return ranks
        _, extra, ladder = best
        ranks[ladder.name] = ladder.up(ranks[ladder.name])
        slack -= extra
