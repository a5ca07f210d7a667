"""The best plan inside a narrow window of cost, for networks too small for ranks to be fine-grained."""

from __future__ import annotations

import numpy as np

# (cost, merit) of every way to treat a layer.
Options = list[tuple[int, float]]

CELLS = 4000


def best_in_window(layers: list[Options], low: int, high: int) -> list[int] | None:
    """One option a layer with low < total cost <= high and the largest total merit, or None.

    Dynamic programming over costs in cells of high / 4000. A cell keeps one partial plan with its exact cost (the
    best merit), so the answer is always inside the window; a plan shadowed by another in its cell can be missed,
    which the window being many cells wide makes rare. O(layers * options * cells).
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
        for number, (price, value) in enumerate(options):
            sums = cost[alive] + price
            fits = sums <= high
            places, sources = sums[fits] // cell, alive[fits]
            gains = merit[sources] + value
            # Several sources can land in one cell: the last write wins, so write in rising order of merit.
            order = np.argsort(gains, kind="stable")
            places, sources, gains, sums = places[order], sources[order], gains[order], sums[fits][order]
            better = gains > new_merit[places]
            places, sources, gains, sums = places[better], sources[better], gains[better], sums[better]
            new_merit[places], new_cost[places] = gains, sums
            pick[places], origin[places] = number, sources
        merit, cost = new_merit, new_cost
        picks.append(pick)
        origins.append(origin)
    inside = np.flatnonzero(np.isfinite(merit) & (cost > low) & (cost <= high))
    if not len(inside):
        return None
    at = int(inside[np.argmax(merit[inside])])
    chosen = []
    for pick, origin in zip(reversed(picks), reversed(origins), strict=True):
        chosen.append(int(pick[at]))
        at = int(origin[at])
    return chosen[::-1]
