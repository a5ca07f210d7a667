"""Ranks by what they do to the output: the curves and the merit of a plan."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leanconv.forms import CHANNEL, SCHEMES, SPATIAL, THREE_D, Choice
from leanconv.forms.spatial import FILTERS
from leanconv.ranks.candidates import Energies
from leanconv.ranks.select import select
from leanconv.ranks.sensitivity.merit import MOST, Curve, LayerSensitivity, allowed, isotonic, least_change, lost
from tests.support.candidates import FIXED, NETWORK, achieved


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(1e-6, 1), st.floats(0, 100)), max_size=6, unique_by=lambda p: p[0]),
    st.lists(st.floats(0, 1.5), min_size=2, max_size=20),
)
def test_curves_never_fall_and_begin_at_nothing(points: list[tuple[float, float]], at: list[float]) -> None:
    curve = Curve(tuple(points), 0.5)
    assert curve(0.0) == 0.0
    values = [curve(x) for x in sorted(at)]
    assert all(low <= high * (1 + 1e-9) for low, high in pairwise(values))


def test_curves_pass_through_what_was_measured() -> None:
    points = ((0.03, 0.01), (0.1, 0.04), (0.3, 0.5))
    curve = Curve(points, 0.5)
    assert [curve(x) for x, _ in points] == pytest.approx([y for _, y in points])
    assert curve(0.03 / 4) == pytest.approx(0.01 / 2)  # a quarter of the energy is half the length
    assert curve(0.9) == pytest.approx(0.5 * 12.5)  # as from 0.1 to 0.3
    # where a measurement falls, between the two
    assert Curve(((0.1, 4.0), (0.2, 1.0)), 0.5)(0.15) == pytest.approx(2.0)
    assert isotonic([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]


def test_where_a_curve_is_reached() -> None:
    points = ((0.03, 0.01), (0.1, 0.04), (0.3, 0.5))
    curve = Curve(points, 0.5)
    for x in (0.001, 0.03, 0.07, 0.1, 0.2, 0.3, 0.9):
        assert curve.reaches(curve(x)) == pytest.approx(x)
    # a layer the output does not depend on never gets there
    assert Curve(((0.03, 0.0), (0.3, 0.0)), 0.5).reaches(0.1) == MOST


SPLITS = {FILTERS: Energies([0.98**index for index in range(NETWORK[2].geometry.spatial_limit)])}
SHARP = LayerSensitivity(output=((0.03, 0.02), (0.1, 0.08), (0.3, 0.4)))
DULL = LayerSensitivity(output=tuple((x, y / 100) for x, y in SHARP.output))


def test_losses_of_both_ranks_add() -> None:
    one, splits = NETWORK[2], SPLITS
    pair, channel, spatial = Choice(THREE_D, (90, 40)), Choice(CHANNEL, (40,)), Choice(SPATIAL, (90,))
    assert lost(one, pair, splits) == pytest.approx(lost(one, channel, splits) + lost(one, spatial, splits))
    assert min(lost(one, channel, splits), lost(one, spatial, splits)) > 0
    full = Choice(THREE_D, (one.geometry.spatial_limit, one.geometry.channel_limit))
    assert lost(one, full, splits) == pytest.approx(0, abs=1e-12)
    assert lost(one, spatial, splits) == pytest.approx(1 - splits[FILTERS].kept[90])  # as the layer sees the filters
    assert lost(one, spatial, {}) == pytest.approx(1 - one.spectra["spatial"].kept[90])  # the filters' own


def test_layers_may_lose_what_changes_the_output_alike() -> None:
    three = {"a": SHARP, "b": DULL, "c": SHARP}
    assert allowed(three)["a"] == pytest.approx(0.1)  # the middle one
    change = Curve(DULL.output, 0.5)(allowed(three)["b"])
    assert change == pytest.approx(Curve(SHARP.output, 0.5)(0.1))
    assert allowed({**three, "d": LayerSensitivity(output=())})["d"] == pytest.approx(0.1)


@pytest.mark.parametrize("speedup", [1.3, 2.0, 3.0, 4.0])
@pytest.mark.parametrize("scheme", ["channel", "spatial", "3d"])
def test_the_layer_that_matters_least_is_cut_most(scheme: Any, speedup: float) -> None:
    """The same layers, one of which changes the output a hundred times less: it costs less, and the others more."""
    macs = []
    for which in (SHARP, DULL):
        merit = least_change({one.name: SHARP for one in NETWORK} | {"c": which}, refits=True)
        plan = select(NETWORK, fixed=FIXED, speedup=speedup, scheme=SCHEMES[scheme], search="forms", merit=merit)
        assert speedup <= achieved(NETWORK, plan, FIXED) < 1.02 * speedup
        macs.append(NETWORK[2].macs(plan.get("c")))
    assert macs[1] < macs[0]


def test_layers_that_are_fitted_in_factors_are_not_left_whole() -> None:
    """What the layers before have lost is made up for where a layer is fitted, and only there."""
    measured = {one.name: SHARP for one in NETWORK}

    def planned(refits: bool) -> set[str]:
        merit = least_change(measured, refits=refits)
        return set(select(NETWORK, fixed=FIXED, speedup=1.2, scheme=SCHEMES["channel"], search="forms", merit=merit))

    assert planned(True) == set(measured)
    assert planned(False) < set(measured)
