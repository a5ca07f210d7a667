"""The best plan under a budget when layers may take several forms. Every layer has a list of options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from leanconv.forms import Choice

CELLS = 4000


class Option(NamedTuple):
    """A way to treat a layer (None: dense), its cost and its merit."""

    choice: Choice | None
    cost: int
    merit: float


Layers = Sequence[Sequence[Option]]


def best_in_window(layers: Layers, low: int, high: int) -> list[Option] | None:
    """One option for every layer with low < total cost <= high and the largest total merit, or None. For networks too
    small for fine-grained ranks.

    Dynamic programming over costs in cells of high / 4000. A cell keeps one partial plan with its exact cost (the
    best merit), so the answer is always inside the window. A plan shadowed by another in its cell can be missed; the
    window is many cells wide, so that is rare. O(layers * options * cells).
    """
    cell = max(1, high // CELLS)
    cells = high // cell + 1
    merit = np.full(cells, -np.inf)
    cost = np.zeros(cells, dtype=np.int64)
    merit[0] = 0.0
    picks: list[np.ndarray] = []
    origins: list[np.ndarray] = []
    for options in layers:
        new_merit = np.full(cells, -np.inf)
        new_cost = np.zeros(cells, dtype=np.int64)
        pick = np.full(cells, -1)
        origin = np.full(cells, -1)
        alive = np.flatnonzero(np.isfinite(merit))
        for index, option in enumerate(options):
            sums = cost[alive] + option.cost
            fits = sums <= high
            targets, sources, sums = sums[fits] // cell, alive[fits], sums[fits]
            gains = merit[sources] + option.merit
            # Several sources can land in one cell: the last write wins, so write in rising order of merit.
            order = np.argsort(gains, kind="stable")
            order = order[gains[order] > new_merit[targets[order]]]
            target = targets[order]
            new_merit[target], new_cost[target] = gains[order], sums[order]
            pick[target], origin[target] = index, sources[order]
        merit, cost = new_merit, new_cost
        picks.append(pick)
        origins.append(origin)
    inside = np.flatnonzero(np.isfinite(merit) & (cost > low) & (cost <= high))
    if not len(inside):
        return None
    at = int(inside[np.argmax(merit[inside])])
    chosen = []
    for options, pick, origin in zip(reversed(layers), reversed(picks), reversed(origins), strict=True):
        chosen.append(options[pick[at]])
        at = int(origin[at])
    return chosen[::-1]


def best_under(layers: Layers, budget: int) -> list[Option]:
    """One option for every layer, total cost <= ``budget``, total merit as large as a common price of cost can make it.

    For a price p every layer takes the option with the largest merit - p cost. Bisection finds the smallest p that fits
    the budget; the rest is spent on the upgrade that gains most, until none fits. O(layers * options * steps). The
    budget must be reachable.
    """
    costs = [np.array([option.cost for option in layer], dtype=np.float64) for layer in layers]
    merits = [np.array([option.merit for option in layer]) for layer in layers]

    def at(price: float) -> list[int]:
        return [int(np.argmax(m - price * c)) for c, m in zip(costs, merits, strict=True)]

    def spent(chosen: list[int]) -> float:
        return float(sum(c[i] for c, i in zip(costs, chosen, strict=True)))

    low, high = 0.0, 1.0 / budget
    while spent(at(high)) > budget and high < 1e30:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if spent(at(middle)) <= budget else (middle, high)
    chosen = at(high)
    if spent(chosen) > budget:
        chosen = [int(np.argmin(c)) for c in costs]
    _spend(costs, merits, chosen, budget - spent(chosen))
    return [layer[index] for layer, index in zip(layers, chosen, strict=True)]


def _spend(costs: list[np.ndarray], merits: list[np.ndarray], chosen: list[int], slack: float) -> None:
    """Change ``chosen`` for the upgrade of one layer with the largest gain, while something fits in ``slack``."""
    while True:
        best = (0.0, -1, -1)
        for layer, (c, m) in enumerate(zip(costs, merits, strict=True)):
            extra, gain = c - c[chosen[layer]], m - m[chosen[layer]]
            fits = np.where(extra <= slack, gain, -np.inf)
            option = int(np.argmax(fits))
            if fits[option] > best[0]:
                best = (float(fits[option]), layer, option)
        _, layer, option = best
        if layer < 0:
            return
        slack -= costs[layer][option] - costs[layer][chosen[layer]]
        chosen[layer] = option
