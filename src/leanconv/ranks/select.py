"""Ranks for a target speed-up, met to within two percent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from leanconv.errors import LeanconvError
from leanconv.forms import RESPONSES, Choice, Choices, Form, Scheme
from leanconv.ranks.candidates import Candidate, Energies
from leanconv.ranks.search_forms import Option, best_in_window, best_under
from leanconv.ranks.search_greedy import Ladder, Ranks, fill, greedy, total, uniform

# speedup <= achieved < WINDOW * speedup
WINDOW = 1.02

# From this share of 1 x 1 filters in the cost the greedy selection is left for the search over forms. It removes
# ranks one by one, and the factors of a 1 x 1 layer cost more than the layer until the rank is under cd / (c + d);
# on k x k filters it is the better of the two.
POINTWISE = 0.1

# How ranks are searched: "greedy" drops eigenvalues one by one, "uniform" gives every layer the same speed-up, "forms"
# looks for the form and ranks of every layer with the largest sum of merits.
Search = Literal["greedy", "uniform", "forms"]

# How good a form of a layer is, or leaving it dense.
Merit = Callable[[Candidate, Choice | None], float]


def log_energy(candidate: Candidate, choice: Choice | None) -> float:
    """Of the responses and the filters."""
    return 0.0 if choice is None else candidate.log_energy(choice)


def select(
    candidates: list[Candidate],
    *,
    fixed: int,
    speedup: float,
    scheme: Scheme,
    search: Search,
    saved: int = 0,
    merit: Merit = log_energy,
) -> Choices:
    """A plan with ``speedup <= before / after < 1.02 speedup``.

    ``fixed``: cost of the layers that are counted but are no candidates. ``saved``: MACs that merging saves as well.
    ``merit``: the search over forms makes its sum largest. Raises LeanconvError where ``speedup`` cannot be reached,
    with the largest number that can.
    """
    before = fixed + sum(candidate.cost.dense for candidate in candidates)
    fixed -= saved  # from here on only what comes after counts
    most = before / (fixed + sum(candidate.macs(cheapest(candidate, scheme)) for candidate in candidates))
    if most <= 1.005:
        raise LeanconvError(
            f"speedup={speedup:g} cannot be reached: the {scheme.name} scheme can make no layer of this network "
            "cheaper; use another scheme or skip fewer layers."
        )
    if most < speedup:
        raise LeanconvError(
            f"speedup={speedup:g} cannot be reached: with {scheme.name} and every rank at 1 this network gets "
            f"{math.floor(100 * most + 1e-9) / 100:.2f}x; ask for at most that"
            + (", or skip fewer layers." if fixed else ".")
        )
    # The epsilon: 680 / 1.36 must be 500, not 499.
    budget = math.floor(before / speedup * (1 + 1e-12)) - fixed
    if search != "forms" and len(scheme.paired) > 1:
        names = " and ".join(form.name for form in scheme.paired)
        raise LeanconvError(
            f"ranks by energy cannot choose between {names}, as their energies do not compare; use "
            "ranks='sensitivity' or 'latency', or a scheme with one of them."
        )
    plan: Choices | None
    many_pointwise = scheme.fitted and _pointwise_share(candidates) > POINTWISE
    if search == "forms" or (search == "greedy" and many_pointwise):
        plan = _by_price(candidates, budget, scheme, merit)
    elif scheme.paired:
        plan = _both_halves_alike(candidates, budget, scheme, search)
    else:
        plan = _one_rank(candidates, budget, scheme, search)
    if plan is not None and _within(candidates, plan, fixed, before, speedup):
        return plan
    # Ranks of this network are too coarse for the selection to land in the window; look for any plan that does.
    low = math.floor(before / (WINDOW * speedup)) - fixed
    options = [_options(candidate, scheme, merit) for candidate in candidates]
    picked = best_in_window(options, low, budget)
    if picked is not None:
        exact = _plan_of(candidates, picked)
        if _within(candidates, exact, fixed, before, speedup):
            return exact
    raise LeanconvError(_too_coarse(options, fixed, before, budget, speedup))


def _pointwise_share(candidates: list[Candidate]) -> float:
    total = sum(c.cost.dense for c in candidates)
    return sum(c.cost.dense for c in candidates if math.prod(c.geometry.kernel) == 1) / max(total, 1)


def _by_price(candidates: list[Candidate], budget: int, scheme: Scheme, merit: Merit) -> Choices:
    """Form (dense, channel, spatial, 3d) and ranks of every layer for the largest sum of merits."""
    options = [_options(candidate, scheme, merit) for candidate in candidates]
    return _plan_of(candidates, best_under(options, budget))


def _plan_of(candidates: list[Candidate], picked: list[Option]) -> Choices:
    return {c.name: choice for c, (choice, *_) in zip(candidates, picked, strict=True) if choice is not None}


def _too_coarse(options: list[list[Option]], fixed: int, before: int, budget: int, speedup: float) -> str:
    """The message of the error, with the nearest speed-up above the target."""
    picked = best_in_window(options, -1, budget)
    nearest = ""
    if picked is not None:
        cost = fixed + sum(option.cost for option in picked)
        nearest = f"; the best plan above it gives {math.floor(1000 * before / cost + 1e-9) / 1000:.3f}x: ask for that"
    return (
        f"speedup={speedup:g} cannot be met to within 2 %: this network has so few filters that no choice of ranks "
        f"lands there{nearest}."
    )


def _within(candidates: list[Candidate], plan: Choices, fixed: int, before: int, speedup: float) -> bool:
    after = fixed + sum(candidate.macs(plan.get(candidate.name)) for candidate in candidates)
    return speedup <= before / after < WINDOW * speedup


def cheapest(candidate: Candidate, scheme: Scheme) -> Choice | None:
    """The form that costs least, whatever it does to the answers; None for dense."""
    forms = scheme.applicable(candidate.geometry)
    return min([None, *(Choice(form, (1,) * len(form.axes)) for form in forms)], key=candidate.macs)


def _climb(ladders: list[Ladder], budget: int, search: Search) -> Ranks:
    """The rank of every ladder, None for dense."""
    ranks = greedy(ladders, budget) if search == "greedy" else uniform(ladders, budget)
    return fill(ladders, ranks, budget, by_energy=search == "greedy")


def _one_rank(candidates: list[Candidate], budget: int, scheme: Scheme, search: Search) -> Choices:
    """All forms of the scheme have one rank: the first one that applies to a layer."""
    forms = {c.name: form for c in candidates for form in scheme.applicable(c.geometry)[:1]}
    usable = [c for c in candidates if c.name in forms]
    rest = sum(c.cost.dense for c in candidates) - sum(c.cost.dense for c in usable)
    ladders = [_ladder(c, forms[c.name]) for c in usable]
    ranks = _climb(ladders, budget - rest, search)
    return {name: Choice(forms[name], (rank,)) for name, rank in ranks.items() if rank is not None}


def _ladder(candidate: Candidate, form: Form, *others: int) -> Ladder:
    """The first rank of ``form``, with the ``others`` already chosen."""
    limit = form.limits(candidate.geometry)[0]
    base = form.macs(candidate.cost, (0, *others))
    return Ladder(
        name=candidate.name,
        dense=candidate.cost.dense,
        step=form.macs(candidate.cost, (1, *others)) - base,
        base=base,
        limit=limit,
        energies=candidate.spectrum(form.axes[0]) or Energies([1.0] * limit),
    )


def _both_halves_alike(candidates: list[Candidate], budget: int, scheme: Scheme, search: Search) -> Choices | None:
    """One form has two ranks, that of the responses last: both halves of it contribute the same factor t; t is the
    smallest for which the whole meets the budget.

    The half of the responses picks every d' at speed-up t; the other half gives the d' filters that result a common
    speed-up t by its own rank. With the 1 x 1 filters counted t is a little over sqrt(speedup).
    """
    (both,) = scheme.paired
    responses = next(form for form in scheme.forms if form.axes == (RESPONSES,))
    filters_only = next((form for form in scheme.forms if form.axes == both.axes[:1]), None)
    dense = sum(c.cost.dense for c in candidates)
    least = sum(c.macs(cheapest(c, Scheme("", (responses,)))) for c in candidates)
    response_ladders = [_ladder(c, responses) for c in candidates]

    def split_form(candidate: Candidate, rank: int | None) -> Form | None:
        """The form that splits the filters of a layer whose responses have ``rank``, None for full rank."""
        return (both if rank is not None else filters_only) if both.applies(candidate.geometry) else None

    def last(rank: int | None) -> tuple[int, ...]:
        return () if rank is None else (rank,)

    def at(factor: float) -> tuple[list[Ladder], Ranks, Ranks]:
        """Ladders and ranks of the first factors, and the ranks of the responses."""
        ranks = _climb(response_ladders, max(int(dense / factor), least), search)
        ladders, first = [], {}
        for c in candidates:
            rank = ranks[c.name]
            if (form := split_form(c, rank)) is not None:
                ladder = _ladder(c, form, *last(rank))
                filters = c.geometry.out_channels if rank is None else rank
                share = filters * c.cost.reduce / factor  # what the k x k filters may cost
                first[c.name] = ladder.settle(max(1, min(int(share / ladder.step), ladder.limit)))
                ladders.append(ladder)
        return ladders, first, ranks

    def plan_of(first: Ranks, ranks: Ranks) -> Choices:
        plan: Choices = {}
        for c in candidates:
            form, before, rank = split_form(c, ranks[c.name]), first.get(c.name), ranks[c.name]
            if form is None and rank is not None:
                plan[c.name] = Choice(responses, (rank,))
            elif form is not None and before is not None:
                plan[c.name] = Choice(form, (before, *last(rank)))
        return plan

    def spent(plan: Choices) -> int:
        return sum(c.macs(plan.get(c.name)) for c in candidates)

    def fits(factor: float) -> bool:
        _, first, ranks = at(factor)
        return spent(plan_of(first, ranks)) <= budget

    low, high = 1.0, 2.0
    while not fits(high):
        if high > 1e9:
            return None
        low, high = high, high * 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    ladders, first, ranks = at(high)
    # What rounding left over goes to the first factors, the finest steps there are.
    others = spent(plan_of(first, ranks)) - total(ladders, first)
    plan = plan_of(fill(ladders, first, budget - others, by_energy=False), ranks)
    assert spent(plan) <= budget
    return plan


def _options(candidate: Candidate, scheme: Scheme, merit: Merit) -> list[Option]:
    """Every way to treat a layer that costs less than leaving it dense."""
    forms = scheme.applicable(candidate.geometry)
    choices = [Choice(form, ranks) for form in forms for ranks in form.grid(candidate.geometry)]
    options = [Option(None, candidate.cost.dense, merit(candidate, None))]
    for choice in choices:
        macs = candidate.macs(choice)
        if macs < candidate.cost.dense:
            options.append(Option(choice, macs, merit(candidate, choice)))
    return options
