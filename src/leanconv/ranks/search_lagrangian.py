"""The best plan under a budget when layers may take several forms: one price for a MAC, every layer on its own."""

from __future__ import annotations

import numpy as np

from leanconv.ranks.search_dynamic import Options


def best_under(layers: list[Options], budget: int) -> list[int]:
    """One option a layer, total cost <= ``budget``, total merit as large as a common price of cost can make it.

    For a price p every layer takes the option with the largest merit - p cost; the smallest p that fits the budget
    is found by bisection, and what it leaves over is spent on the upgrade that gains most, until none fits.
    O(layers * options * steps). The budget must be reachable.
    """
    costs = [np.array([cost for cost, _ in layer], dtype=np.float64) for layer in layers]
    merits = [np.array([merit for _, merit in layer]) for layer in layers]

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
    return _spend(costs, merits, chosen, budget)


def _spend(costs: list[np.ndarray], merits: list[np.ndarray], chosen: list[int], budget: float) -> list[int]:
    """Upgrade one layer at a time, the largest gain first, while something fits in what is left."""
    chosen = list(chosen)
    slack = budget - sum(c[i] for c, i in zip(costs, chosen, strict=True))
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
            return chosen
        slack -= costs[layer][option] - costs[layer][chosen[layer]]
        chosen[layer] = option
