"""Rank selection: the budget is met, greedy is right where it can be checked, bad targets are refused."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanconv.errors import LeanconvError
from leanconv.forms import CHANNEL, SCHEMES, SPATIAL, THREE_D, Choice
from leanconv.network.layers.geometry import Cost, Geometry
from leanconv.ranks import by_hand, select
from leanconv.ranks.candidates import Energies
from leanconv.ranks.search_forms import Option, best_in_window
from leanconv.ranks.search_greedy import Ladder, greedy
from tests.support.candidates import FIXED, NETWORK, achieved, candidate


@pytest.mark.parametrize("speedup", [1.01, 1.3, 2.0, 3.0, 4.0, 5.5])
@pytest.mark.parametrize("search", ["uniform", "greedy"])
@pytest.mark.parametrize("scheme", ["channel", "spatial", "3d"])
def test_target_is_met_exactly(scheme, search, speedup: float) -> None:
    plan = select(NETWORK, fixed=FIXED, speedup=speedup, scheme=SCHEMES[scheme], search=search)
    assert speedup <= achieved(NETWORK, plan, FIXED) < 1.02 * speedup
    for c in NETWORK:
        if c.name in plan:
            assert c.macs(plan[c.name]) < c.cost.dense


def test_costs_are_those_of_the_modules() -> None:
    """Counted by hand from the shapes of the factors, for a strided layer."""
    geometry = Geometry(kind="conv2d", in_channels=6, out_channels=10, kernel=(3, 5), stride=(2, 2), padding=(1, 2))
    cost = Cost.of(geometry, (20, 30), (10, 15))
    assert cost.dense == 10 * 15 * 10 * 6 * 15
    assert CHANNEL.macs(cost, (4,)) == 10 * 15 * (4 * 6 * 15 + 10 * 4)
    assert SPATIAL.macs(cost, (7,)) == 10 * 30 * 7 * 6 * 3 + 10 * 15 * 10 * 7 * 5
    assert THREE_D.macs(cost, (7, 4)) == 10 * 30 * 7 * 6 * 3 + 10 * 15 * 4 * 7 * 5 + 10 * 15 * 10 * 4


def test_unreachable_names_the_largest_reachable_number() -> None:
    with pytest.raises(LeanconvError, match=r"speedup=500 cannot be reached") as caught:
        select(NETWORK, fixed=FIXED, speedup=500, scheme=SCHEMES["channel"], search="greedy")
    largest = float(str(caught.value).split("gets ")[1].split("x")[0])
    plan = select(NETWORK, fixed=FIXED, speedup=largest, scheme=SCHEMES["channel"], search="greedy")
    assert largest <= achieved(NETWORK, plan, FIXED) < 1.02 * largest
    with pytest.raises(LeanconvError):
        select(NETWORK, fixed=FIXED, speedup=largest + 0.02, scheme=SCHEMES["channel"], search="greedy")


def ladder(name: str, values: list[float], step: int) -> Ladder:
    energies = Energies(values)
    limit = len(values)
    # Dense costs exactly the full-rank factors plus one, so that every rank pays.
    return Ladder(name=name, dense=limit * step + 1, step=step, base=0, limit=limit, energies=energies)


def test_greedy_equals_brute_force_on_equal_steps() -> None:
    """With one price a rank the greedy order is that of the true optimum of the product of energies."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        ladders = [
            ladder(name, sorted(torch.rand(5, generator=generator).add(0.01).tolist(), reverse=True), 10)
            for name in "abc"
        ]
        for budget in (40, 70, 100):
            found = greedy(ladders, budget)

            def merit(ranks) -> float:
                return math.prod(x.energies.kept[r] for x, r in zip(ladders, ranks, strict=True))  # noqa: B023

            best = max(
                (ranks for ranks in itertools.product(range(1, 6), repeat=3) if 10 * sum(ranks) <= budget), key=merit
            )
            assert merit([found[x.name] for x in ladders]) == pytest.approx(merit(best))


def test_energy_keeps_more_than_uniform() -> None:
    def product(plan) -> float:
        return math.prod(c.energy(plan[c.name]) if c.name in plan else 1.0 for c in NETWORK)

    chosen = [
        select(NETWORK, fixed=FIXED, speedup=4, scheme=SCHEMES["channel"], search=s) for s in ("greedy", "uniform")
    ]
    assert product(chosen[0]) > product(chosen[1])


def test_uniform_gives_every_layer_about_the_same_speedup() -> None:
    plan = select(NETWORK, fixed=0, speedup=3, scheme=SCHEMES["channel"], search="uniform")
    ratios = [c.cost.dense / c.macs(plan[c.name]) for c in NETWORK]
    assert max(ratios) / min(ratios) < 1.06


def test_3d_halves_contribute_the_same() -> None:
    plan = select(NETWORK, fixed=0, speedup=4, scheme=SCHEMES["3d"], search="uniform")
    for c in NETWORK:
        d2, d1 = plan[c.name].ranks
        channel = c.cost.dense / CHANNEL.macs(c.cost, (d1,))
        spatial = d1 * c.cost.reduce / (THREE_D.macs(c.cost, (d2, d1)) - THREE_D.macs(c.cost, (0, d1)))
        assert channel == pytest.approx(spatial, rel=0.08)


def test_3d_uses_what_applies() -> None:
    mixed = [*NETWORK, candidate("one", 256, 256, 14, k=1, decay=0.8)]
    plan = select(mixed, fixed=0, speedup=3, scheme=SCHEMES["3d"], search="greedy")
    assert plan["one"].form is CHANNEL
    assert plan["a"].form is THREE_D


@settings(max_examples=60, deadline=None)
@given(
    widths=st.lists(st.integers(4, 40), min_size=2, max_size=5),
    speedup=st.floats(1.05, 6.0),
    scheme=st.sampled_from(["channel", "spatial", "3d"]),
    search=st.sampled_from(["uniform", "greedy"]),
    decay=st.floats(0.3, 0.99),
)
def test_small_networks_meet_the_target_or_say_which_they_can(widths, speedup, scheme, search, decay) -> None:
    candidates = [candidate(str(i), c, d, size=8, decay=decay) for i, (c, d) in enumerate(itertools.pairwise(widths))]
    arguments = {"fixed": 1000, "scheme": SCHEMES[scheme], "search": search}
    try:
        plan = select(candidates, speedup=speedup, **arguments)
    except LeanconvError as error:
        said = str(error)
        marker = "gets " if "cannot be reached" in said else "gives "
        possible = float(said.split(marker)[1].split("x")[0])
        if possible <= 1:
            return
        plan = select(candidates, speedup=possible, **arguments)
        speedup = possible
    assert speedup <= achieved(candidates, plan, 1000) < 1.02 * speedup


def test_window_search_against_brute_force() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        layers = [
            [Option(None, int(cost), float(merit)) for cost, merit in torch.rand(6, 2, generator=generator) * 1000]
            for _ in range(4)
        ]
        plans = list(itertools.product(range(6), repeat=4))
        costs = {p: sum(layers[i][n].cost for i, n in enumerate(p)) for p in plans}
        merits = {p: sum(layers[i][n].merit for i, n in enumerate(p)) for p in plans}
        low, high = 1500, 1530
        inside = [p for p in plans if low < costs[p] <= high]
        found = best_in_window(layers, low, high)
        assert (found is None) == (not inside)
        if found is not None:
            assert all(option in layer for option, layer in zip(found, layers, strict=True))
            assert low < sum(option.cost for option in found) <= high
            assert sum(option.merit for option in found) >= max(merits[p] for p in inside) - 60


def test_by_hand() -> None:
    sites = {c.name: c.geometry for c in [*NETWORK, candidate("one", 8, 8, k=1)]}
    assert by_hand({"a": 5}, sites, {}, SCHEMES["channel"]) == {"a": Choice(CHANNEL, (5,))}
    assert by_hand({"a": (7, 5), "one": 3}, sites, {}, SCHEMES["3d"]) == {
        "a": Choice(THREE_D, (7, 5)),
        "one": Choice(CHANNEL, (3,)),
    }
    refused = [
        ({"a": 65}, "channel", r"d' = 65; this layer allows 1 to 64"),
        ({"a": 0}, "channel", r"allows 1 to 64"),
        ({"a": 193}, "spatial", r"d'' = 193; this layer allows 1 to 192"),
        ({"a": 5}, "3d", r"pair"),
        ({"a": 2.5}, "channel", r"whole number"),
        ({"aa": 5}, "channel", r"'aa', which does not exist; did you mean a"),
        ({"one": 4}, "spatial", r"cannot be split spatially"),
        ({}, "channel", r"empty"),
    ]
    for ranks, scheme, message in refused:
        with pytest.raises(LeanconvError, match=message):
            by_hand(ranks, sites, {}, SCHEMES[scheme])
    with pytest.raises(LeanconvError, match="grouped"):
        by_hand({"x": 1}, sites, {"x": "grouped convolution"}, SCHEMES["channel"])


def test_coarse_layers_are_searched_rank_by_rank() -> None:
    one = [candidate("a", 16, 32, 28)]
    for speedup in (10, 11):
        plan = select(one, fixed=0, speedup=speedup, scheme=SCHEMES["3d"], search="greedy")
        assert speedup <= achieved(one, plan, 0) < 1.02 * speedup


def test_a_scheme_that_saves_nothing_says_so() -> None:
    with pytest.raises(LeanconvError, match="can make no layer of this network cheaper"):
        select([candidate("a", 32, 32, k=1)], fixed=0, speedup=2, scheme=SCHEMES["spatial"], search="greedy")


def test_networks_of_pointwise_layers_choose_forms() -> None:
    """Bottlenecks: at equal cost the search over forms keeps more energy than cutting every layer alike."""
    mixed = [candidate(f"{i}{k}", 64, 64, 14, k=k, decay=0.85 + 0.03 * i) for i in range(4) for k in (1, 3)]
    for scheme in ("channel", "3d"):
        plan = select(mixed, fixed=0, speedup=1.8, scheme=SCHEMES[scheme], search="greedy")
        assert 1.8 <= achieved(mixed, plan, 0) < 1.8 * 1.02
    channel = select(mixed, fixed=0, speedup=1.8, scheme=SCHEMES["channel"], search="greedy")
    alike = select(mixed, fixed=0, speedup=1.8, scheme=SCHEMES["channel"], search="uniform")

    def kept(plan) -> float:
        return math.prod(c.energy(plan[c.name]) if c.name in plan else 1.0 for c in mixed)

    assert kept(channel) > kept(alike)
