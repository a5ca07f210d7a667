"""Ranks for a target speed-up, met to within two percent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from leanconv.errors import LeanconvError
from leanconv.network.layers.geometry import Scheme
from leanconv.ranks.candidates import Candidate, Choice, Energies, Plan
from leanconv.ranks.portable_log import log
from leanconv.ranks.search_dynamic import Options, best_in_window
from leanconv.ranks.search_greedy import Ladder, Ranks, fill, greedy, total, uniform
from leanconv.ranks.search_lagrangian import best_under

# speedup <= achieved < WINDOW * speedup
WINDOW = 1.02

# From this share of 1 x 1 filters in the cost the greedy selection is left for the search over forms. It removes
# ranks one by one, and the factors of a 1 x 1 layer cost more than the layer until the rank is under cd / (c + d);
# on k x k filters it is the better of the two.
POINTWISE = 0.1

Method = Literal["uniform", "energy", "sensitivity"]

# A way to treat a layer (None: dense), its cost and its merit.
Option = tuple[Choice | None, int, float]
# How good a form of a layer is, or leaving it dense.
Merit = Callable[[Candidate, Choice | None], float]


def log_energy(candidate: Candidate, choice: Choice | None) -> float:
    """Of the responses and the filters."""
    if choice is None:
        return 0.0
    kept = candidate.energy(choice)
    if choice.scheme == "3d" and candidate.spatial:
        kept *= candidate.spatial.kept[choice.ranks[0]]
    return log(max(kept, 1e-300))


def select(
    candidates: list[Candidate],
    *,
    fixed: int,
    speedup: float,
    scheme: Scheme,
    method: Method,
    saved: int = 0,
    merit: Merit = log_energy,
) -> Plan:
    """A plan with ``speedup <= before / after < 1.02 speedup``.

    ``fixed`` is the cost of the layers that are counted but not candidates, ``saved`` what will be saved besides by
    merging; ``merit`` is what the search over forms makes largest in sum. Raises LeanconvError, with the largest number
    that can be reached, where the target cannot.
    """
    before = fixed + sum(candidate.cost.dense for candidate in candidates)
    fixed -= saved  # from here on only what comes after counts
    most = before / (fixed + sum(candidate.macs(cheapest(candidate, scheme)) for candidate in candidates))
    if most <= 1.005:
        raise LeanconvError(
            f"speedup={speedup:g} cannot be reached: the {scheme} scheme can make no layer of this network cheaper; "
            "use another scheme or skip fewer layers."
        )
    if most < speedup:
        raise LeanconvError(
            f"speedup={speedup:g} cannot be reached: with {scheme} and every rank at 1 this network gets "
            f"{math.floor(100 * most + 1e-9) / 100:.2f}x; ask for at most that"
            + (", or skip fewer layers." if fixed else ".")
        )
    # The epsilon: 680 / 1.36 must be 500, not 499.
    budget = math.floor(before / speedup * (1 + 1e-12)) - fixed
    plan: Plan | None
    by_form = method == "energy" and scheme != "spatial" and _pointwise_share(candidates) > POINTWISE
    if by_form or method == "sensitivity":
        plan = _by_price(candidates, budget, scheme, merit)
    elif scheme == "3d":
        plan = _three_d(candidates, budget, method)
    else:
        plan = _one_way(candidates, budget, scheme, method)
    if plan is not None and _within(candidates, plan, fixed, before, speedup):
        return plan
    # Ranks of this network are too coarse for the selection to land in the window; look for any plan that does.
    low = math.floor(before / (WINDOW * speedup)) - fixed
    options = [_options(candidate, scheme, merit) for candidate in candidates]
    picked = best_in_window([[(cost, merit) for _, cost, merit in layer] for layer in options], low, budget)
    if picked is not None:
        exact = _picked(candidates, options, picked)
        if _within(candidates, exact, fixed, before, speedup):
            return exact
    raise LeanconvError(_too_coarse(options, fixed, before, budget, speedup))


def _pointwise_share(candidates: list[Candidate]) -> float:
    total = sum(c.cost.dense for c in candidates)
    return sum(c.cost.dense for c in candidates if math.prod(c.geometry.kernel) == 1) / max(total, 1)


def _by_price(candidates: list[Candidate], budget: int, scheme: Scheme, merit: Merit) -> Plan:
    """Form (dense, channel, spatial, 3d) and ranks of every layer for the largest sum of merits."""
    options = [_options(candidate, scheme, merit) for candidate in candidates]
    picked = best_under([[(cost, merit) for _, cost, merit in layer] for layer in options], budget)
    return _picked(candidates, options, picked)


def _picked(candidates: list[Candidate], options: list[list[Option]], picked: list[int]) -> Plan:
    chosen = [layer[number][0] for layer, number in zip(options, picked, strict=True)]
    return {c.name: choice for c, choice in zip(candidates, chosen, strict=True) if choice is not None}


def _too_coarse(options: list[list[Option]], fixed: int, before: int, budget: int, speedup: float) -> str:
    """The nearest speed-up above, found by letting the cost fall until some plan fits."""
    high = budget
    costs: list[Options] = [[(cost, merit) for _, cost, merit in layer] for layer in options]
    picked = best_in_window(costs, -1, high)
    nearest = ""
    if picked is not None:
        cost = fixed + sum(layer[number][0] for layer, number in zip(costs, picked, strict=True))
        nearest = f"; the best plan above it gives {math.floor(1000 * before / cost + 1e-9) / 1000:.3f}x: ask for that"
    return (
        f"speedup={speedup:g} cannot be met to within 2 %: this network has so few filters that no choice of ranks "
        f"lands there{nearest}."
    )


def _within(candidates: list[Candidate], plan: Plan, fixed: int, before: int, speedup: float) -> bool:
    after = fixed + sum(candidate.macs(plan.get(candidate.name)) for candidate in candidates)
    return speedup <= before / after < WINDOW * speedup


def cheapest(candidate: Candidate, scheme: Scheme) -> Choice | None:
    """The form that costs least, whatever it does to the answers; None for dense."""
    forms = [Choice("channel", (1,))] if _has_channel(scheme) else []
    if _has_spatial(scheme) and candidate.geometry.splits_spatially:
        forms.append(Choice("spatial", (1,)))
        if scheme == "3d":
            forms.append(Choice("3d", (1, 1)))
    return min([None, *forms], key=candidate.macs)


def _has_channel(scheme: Scheme) -> bool:
    return scheme in ("channel", "3d")


def _has_spatial(scheme: Scheme) -> bool:
    return scheme in ("spatial", "3d")


def _selection(method: Method) -> Callable[[list[Ladder], int], Ranks]:
    return greedy if method == "energy" else uniform


def _one_way(candidates: list[Candidate], budget: int, scheme: Scheme, method: Method) -> Plan:
    usable = [c for c in candidates if scheme == "channel" or c.geometry.splits_spatially]
    rest = sum(c.cost.dense for c in candidates) - sum(c.cost.dense for c in usable)
    ladders = [_channel_ladder(c) if scheme == "channel" else _spatial_ladder(c) for c in usable]
    ranks = _selection(method)(ladders, budget - rest)
    ranks = fill(ladders, ranks, budget - rest, by_energy=method == "energy")
    return {name: Choice(scheme, (rank,)) for name, rank in ranks.items() if rank is not None}


def _channel_ladder(candidate: Candidate) -> Ladder:
    limit = candidate.geometry.channel_limit
    return Ladder(
        name=candidate.name,
        dense=candidate.cost.dense,
        step=candidate.cost.channel(1),
        base=0,
        limit=limit,
        energies=candidate.channel or Energies([1.0] * limit),
    )


def _spatial_ladder(candidate: Candidate, channel_rank: int | None = None) -> Ladder:
    """Ranks d'' of the vertical filters, alone or with d' already chosen."""
    limit = candidate.geometry.spatial_limit
    if channel_rank is None:
        base, step = 0, candidate.cost.spatial(1)
    else:
        base = candidate.cost.both(0, channel_rank)
        step = candidate.cost.both(1, channel_rank) - base
    return Ladder(
        name=candidate.name,
        dense=candidate.cost.dense,
        step=step,
        base=base,
        limit=limit,
        energies=candidate.spatial or Energies([1.0] * limit),
    )


def _three_d(candidates: list[Candidate], budget: int, method: Method) -> Plan | None:
    """Both halves contribute the same factor t; t is the smallest for which the whole meets the budget.

    The channel half picks every d' at speed-up t by ``method``; the spatial half gives the d' filters that result
    a common speed-up t by their d''. With the 1 x 1 filters counted t is a little over sqrt(speedup).
    """
    dense = sum(c.cost.dense for c in candidates)
    least = sum(c.macs(cheapest(c, "channel")) for c in candidates)

    def at(factor: float) -> tuple[list[Ladder], Ranks, Plan, int]:
        channel_budget = max(int(dense / factor), least)
        ladders = [_channel_ladder(c) for c in candidates]
        channel = _selection(method)(ladders, channel_budget)
        channel = fill(ladders, channel, channel_budget, by_energy=method == "energy")
        spatial_ladders, spatial, fixed_plan, spent = [], {}, {}, 0
        for c in candidates:
            rank = channel[c.name]
            if not c.geometry.splits_spatially:
                if rank is not None:
                    fixed_plan[c.name] = Choice("channel", (rank,))
                spent += c.macs(fixed_plan.get(c.name))
                continue
            ladder = _spatial_ladder(c, rank)
            filters = c.geometry.out_channels if rank is None else rank
            share = filters * c.cost.reduce / factor  # what the k x k filters may cost
            spatial[c.name] = ladder.settle(max(1, min(int(share / ladder.step), ladder.limit)))
            spatial_ladders.append(ladder)
        plan = dict(fixed_plan)
        for c in candidates:
            if (d2 := spatial.get(c.name)) is not None:
                rank = channel[c.name]
                plan[c.name] = Choice("spatial", (d2,)) if rank is None else Choice("3d", (d2, rank))
        return spatial_ladders, spatial, plan, spent

    def spent_at(factor: float) -> int:
        plan = at(factor)[2]
        return sum(c.macs(plan.get(c.name)) for c in candidates)

    low, high = 1.0, 2.0
    while spent_at(high) > budget:
        if high > 1e9:
            return None
        low, high = high, high * 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if spent_at(middle) <= budget else (middle, high)
    ladders, spatial, plan, spent = at(high)
    # What rounding left over goes to the vertical filters, the finest steps there are.
    spatial = fill(ladders, spatial, budget - spent, by_energy=False)
    for name, d2 in spatial.items():
        old = plan.pop(name, None)
        if d2 is not None and old is not None:
            plan[name] = Choice(old.scheme, (d2, *old.ranks[1:]))
    assert total(ladders, spatial) + spent <= budget
    return plan


def _options(candidate: Candidate, scheme: Scheme, merit: Merit) -> list[Option]:
    """Every way to treat a layer that costs less than leaving it dense."""
    g = candidate.geometry
    choices: list[Choice] = []
    if _has_channel(scheme):
        choices += [Choice("channel", (rank,)) for rank in _some(g.channel_limit, 512)]
    if _has_spatial(scheme) and g.splits_spatially:
        choices += [Choice("spatial", (rank,)) for rank in _some(g.spatial_limit, 512)]
        if scheme == "3d":
            # All pairs where the layer is small enough for its ranks to be coarse, an even grid where it is not.
            most = 512 if g.spatial_limit * g.channel_limit <= 4000 else 40
            choices += [
                Choice("3d", (d2, d1)) for d2 in _some(g.spatial_limit, most) for d1 in _some(g.channel_limit, most)
            ]
    options: list[Option] = [(None, candidate.cost.dense, merit(candidate, None))]
    for choice in choices:
        macs = candidate.macs(choice)
        if macs < candidate.cost.dense:
            options.append((choice, macs, merit(candidate, choice)))
    return options


def _some(limit: int, most: int) -> list[int]:
    """Ranks 1 .. limit, all or an even selection of them."""
    if limit <= most:
        return list(range(1, limit + 1))
    return sorted({1 + round(i * (limit - 1) / (most - 1)) for i in range(most)})
