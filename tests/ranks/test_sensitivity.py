"""Ranks by what they do to the output: the curves, the merit of a plan, and what splits lose."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanconv.calibrate.probes import Probe
from leanconv.forms import CHANNEL, SCHEMES, SPATIAL, THREE_D, Choice
from leanconv.forms.spatial import FILTERS
from leanconv.forms.tucker2 import input_basis
from leanconv.network.fold import folded
from leanconv.network.survey import survey
from leanconv.ranks.select import select
from leanconv.ranks.sensitivity.measure import split_loss
from leanconv.ranks.sensitivity.merit import MOST, Curve, LayerSensitivity, allowed, isotonic, least_change, lost
from leanconv.solve import Metric, spatial_basis, spatial_basis_as_seen
from tests.support.candidates import FIXED, NETWORK, achieved
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images


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


SPLITS = ((0.2, 0.05), (0.5, 0.3))
SHARP = LayerSensitivity(output=((0.03, 0.02), (0.1, 0.08), (0.3, 0.4)), splits={FILTERS: SPLITS})
DULL = LayerSensitivity(output=tuple((x, y / 100) for x, y in SHARP.output), splits=SHARP.splits)


def test_losses_of_both_ranks_add() -> None:
    one, splits = NETWORK[2], {FILTERS: Curve(SPLITS, 1.0)}
    pair, channel, spatial = Choice(THREE_D, (90, 40)), Choice(CHANNEL, (40,)), Choice(SPATIAL, (90,))
    assert lost(one, pair, splits) == pytest.approx(lost(one, channel, splits) + lost(one, spatial, splits))
    assert min(lost(one, channel, splits), lost(one, spatial, splits)) > 0
    full = Choice(THREE_D, (one.geometry.spatial_limit, one.geometry.channel_limit))
    assert lost(one, full, splits) == pytest.approx(0, abs=1e-12)


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


def layer_and_patches() -> tuple[Probe, torch.Tensor]:
    """A layer, and what it sees: patches whose directions the filters' energy knows nothing of."""
    model, images = plain_network(batch_norm=False).double(), smooth_images(8).double()
    site = next(site for site in survey(model, images).sites if site.name == "2")
    probe = Probe(site, *folded(model, site, torch.float64))
    torch.manual_seed(0)
    mix = torch.randn(20, probe.weight[0].numel(), dtype=torch.float64)
    return probe, torch.randn(4000, 20, dtype=torch.float64) @ mix


@pytest.mark.parametrize("basis", [spatial_basis, input_basis])
def test_a_split_loses_what_it_does_not_explain_and_regression_gets_some_of_it_back(basis: Any) -> None:
    probe, patches = layer_and_patches()
    split = basis(probe.weight).split(10)
    half = patches[len(patches) // 2 :]
    y, given = (half @ weight.flatten(1).T for weight in (probe.weight, split.product()))
    plain = float((y - given).square().sum() / (y - y.mean(0)).square().sum())
    assert split_loss(probe, split, patches, None, corrected=False) == pytest.approx(plain)
    assert 0 < split_loss(probe, split, patches, None, corrected=True) < 0.9 * plain


def test_at_full_rank_nothing_is_lost() -> None:
    probe, patches = layer_and_patches()
    full = spatial_basis(probe.weight).split(probe.site.geometry.spatial_limit)
    for corrected in (False, True):
        assert split_loss(probe, full, patches, None, corrected=corrected) < 1e-9


def test_where_regression_learns_noise_the_split_as_it_is_counts() -> None:
    probe, patches = layer_and_patches()
    split = spatial_basis(probe.weight).split(10)
    for few in (2, 6, 40):
        plain, best = (
            split_loss(probe, split, patches[:few], None, corrected=corrected) for corrected in (False, True)
        )
        assert best <= plain


def test_losses_are_in_the_metric_of_the_output() -> None:
    """What nothing feels is no loss: that of filters whose responses are scaled away, and not of those that are not."""
    probe, patches = layer_and_patches()
    d = len(probe.weight)
    split = spatial_basis(probe.weight).split(10)
    alike = Metric.of(5 * torch.eye(d, dtype=torch.float64))
    assert alike is not None
    plain = split_loss(probe, split, patches, None, corrected=False)
    assert split_loss(probe, split, patches, alike, corrected=False) == pytest.approx(plain)
    one = Metric(torch.diag(torch.tensor([1.0, *[0.0] * (d - 1)], dtype=torch.float64)))
    half = patches[len(patches) // 2 :]
    y, given = ((half @ weight.flatten(1).T)[:, 0] for weight in (probe.weight, split.product()))
    wanted = float((y - given).square().sum() / (y - y.mean()).square().sum())
    assert split_loss(probe, split, patches, one, corrected=False) == pytest.approx(wanted)


def test_splits_for_what_is_seen_lose_less() -> None:
    probe, patches = layer_and_patches()
    seen = spatial_basis_as_seen(probe.weight, patches)
    assert seen is not None
    for rank in (4, 10):
        before, after = (
            split_loss(probe, basis.split(rank), patches, None, corrected=True)
            for basis in (spatial_basis(probe.weight), seen)
        )
        assert after < before


def test_responses_that_never_vary_lose_nothing() -> None:
    probe, patches = layer_and_patches()
    split = spatial_basis(probe.weight).split(4)
    for corrected in (False, True):
        assert split_loss(probe, split, torch.zeros_like(patches), None, corrected=corrected) == 0.0
