"""Every form on layers of every geometry: what it costs, its ranks, its modules, and what is saved of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from leanconv.errors import LeanconvError
from leanconv.forms import FORMS, MERGED, RESPONSES, SCHEMES, THREE_D, Form, as_scheme
from leanconv.forms.replace import Change, factor_modules
from leanconv.network.layers.kinds import REPLACEABLE
from leanconv.network.layers.modules import Factors, filled
from leanconv.network.sites import Site
from leanconv.network.survey import survey
from tests.support.networks import CONV_CASES, network_of

CHOSEN = {name: form for name, form in FORMS.items() if form is not MERGED}
SAMPLE = torch.rand(1, 3, 14, 18, generator=torch.Generator().manual_seed(0)).double()


def layer_of(case: str) -> tuple[nn.Module, Site]:
    network = network_of(CONV_CASES[case]).double()
    return network[2], next(site for site in survey(network, SAMPLE).sites if site.name == "2")


SITES = {case: layer_of(case) for case in CONV_CASES}
APPLIES = [
    pytest.param(form, case, id=f"{form.name}-{case}")
    for form, case in itertools.product(CHOSEN.values(), CONV_CASES)
    if form.applies(SITES[case][1].geometry)
]


def inputs_of(site: Site, batch: int = 1) -> Tensor:
    return torch.rand(batch, site.geometry.in_channels, *site.in_size, generator=torch.Generator().manual_seed(1))


def counted(module: nn.Module, x: Tensor) -> int:
    """Multiply-accumulates, as torch counts them."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(x)
    return counter.get_total_flops() // 2


def change_with(form: Form, site: Site, ranks: tuple[int, ...], **other: Any) -> Change:
    return Change(name=site.name, form=form, ranks=ranks, geometry=site.geometry, **other)


def some_ranks(form: Form, site: Site) -> list[tuple[int, ...]]:
    limits = form.limits(site.geometry)
    return [(1,) * len(limits), tuple(max(1, limit // 2) for limit in limits), limits]


@pytest.mark.parametrize(("form", "case"), APPLIES)
def test_costs_are_those_of_the_modules_run(form: Form, case: str) -> None:
    layer, site = SITES[case]
    x = inputs_of(site)
    for ranks in some_ranks(form, site):
        modules = factor_modules(change_with(form, site, ranks))
        assert counted(modules, x) == form.macs(site.cost, ranks)
        first = next(number for number, module in enumerate(modules) if isinstance(module, REPLACEABLE))
        assert counted(modules[: first + 1], x) == form.first_macs(site.cost, ranks)
        with torch.no_grad():
            assert modules.double()(x.double()).shape == layer(x.double()).shape


@pytest.mark.parametrize(("form", "case"), APPLIES)
def test_at_full_ranks_the_split_filters_are_the_layer(form: Form, case: str) -> None:
    """The filters split along the form's axis, and their responses on a basis of all of them."""
    layer, site = SITES[case]
    assert isinstance(layer.weight, Tensor)
    geometry, weights, filters = site.geometry, [], layer.weight.detach()
    if form.split_axis is not None:
        assert form.split_axis.basis is not None
        split = form.split_axis.basis(filters).split(form.rank_on(form.split_axis, geometry, form.limits(geometry)))
        weights, filters = [split.first], split.second
    if RESPONSES in form.axes:
        parts = zip(layer.weight.detach().chunk(geometry.groups), filters.chunk(geometry.groups), strict=True)
        bases, mixed = [], []
        for whole, part in parts:
            basis = torch.linalg.svd(whole.flatten(1), full_matrices=False).U[:, : geometry.channel_limit]
            bases.append(basis)
            mixed.append((basis.T @ part.flatten(1)).unflatten(1, part.shape[1:]))
        weights += [torch.cat(mixed), torch.cat(bases)]
    else:
        weights.append(filters)
    bias = torch.zeros(len(layer.weight)) if layer.bias is None else layer.bias
    change = change_with(form, site, form.limits(geometry))
    modules = filled(lambda: factor_modules(change), Factors(tuple(weights), bias.detach()), layer.weight)
    x = inputs_of(site, 2).double()
    with torch.no_grad():
        torch.testing.assert_close(modules(x), layer(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("form", "case"), APPLIES)
def test_ranks_have_limits_and_a_grid_within_them(form: Form, case: str) -> None:
    layer, site = SITES[case]
    assert isinstance(layer.weight, Tensor)
    limits, grid = form.limits(site.geometry), list(form.grid(site.geometry))
    assert len(limits) == len(form.axes)
    assert min(limits) >= 1
    assert len(set(grid)) == len(grid)
    assert {(1,) * len(limits), limits} <= set(grid)
    assert all(1 <= rank <= limit for ranks in grid for rank, limit in zip(ranks, limits, strict=True))
    for axis, limit in zip(form.axes, limits, strict=True):
        assert form.rank_on(axis, site.geometry, (1,) * len(limits)) == 1
        if axis.basis is not None:  # as many ranks as the filters have energies
            assert len(axis.basis(layer.weight.detach()).values) == limit


@pytest.mark.parametrize("form", CHOSEN.values(), ids=str)
def test_a_grid_of_large_layers_is_an_even_selection(form: Form) -> None:
    _, site = SITES["plain"]
    wide = dataclasses.replace(site.geometry, in_channels=512, out_channels=512)
    grid = list(form.grid(wide))
    limits = form.limits(wide)
    assert len(grid) <= 4000
    assert {(1,) * len(limits), limits} <= set(grid)
    for number, limit in enumerate(limits):
        tried = sorted({ranks[number] for ranks in grid})
        gaps = {b - a for a, b in itertools.pairwise(tried)}
        assert max(gaps) - min(gaps) <= 1
        assert tried[-1] == limit


@pytest.mark.parametrize("form", CHOSEN.values(), ids=str)
def test_a_rank_that_a_form_does_not_cut_is_the_full_one(form: Form) -> None:
    _, site = SITES["plain"]
    for other in CHOSEN.values():
        for axis in other.axes:
            if axis not in form.axes:
                ones = (1,) * len(form.axes)
                assert form.rank_on(axis, site.geometry, ones) == axis.limit(site.geometry)


@pytest.mark.parametrize(("form", "case"), APPLIES)
def test_a_change_comes_back_from_json(form: Form, case: str) -> None:
    _, site = SITES[case]
    for other in ({}, {"batch_norm": "3"}, {"open": True}, {"inputs": 5}):
        change = change_with(form, site, form.limits(site.geometry), **other)
        assert Change.from_json(json.loads(json.dumps(change.to_json()))) == change


@pytest.mark.parametrize("form", [form for form in CHOSEN.values() if form.pointwise_end], ids=str)
def test_an_open_change_ends_before_its_pointwise_filters(form: Form) -> None:
    _, site = SITES["plain"]
    ranks = form.limits(site.geometry)
    whole, less = (factor_modules(change_with(form, site, ranks, open=opened)) for opened in (False, True))
    assert [name for name, _ in whole.named_children()][:-1] == [name for name, _ in less.named_children()]
    last = whole[-1]
    assert isinstance(last, REPLACEABLE)
    assert set(last.kernel_size) == {1}
    assert less(inputs_of(site)).shape[1] == ranks[-1]


@pytest.mark.parametrize("form", FORMS.values(), ids=str)
def test_a_layer_that_took_in_a_factor_sees_fewer_channels(form: Form) -> None:
    _, site = SITES["plain"]
    ranks = form.limits(site.geometry)
    modules = factor_modules(change_with(form, site, ranks, inputs=3))
    x = inputs_of(site)
    given = site.geometry.in_channels
    first = form.first_macs(site.cost, ranks)
    assert counted(modules, x[:, :3]) == form.macs(site.cost, ranks) - first // given * (given - 3)


def test_a_merged_layer_is_never_chosen_for_itself() -> None:
    assert not any(MERGED.applies(site.geometry) for _, site in SITES.values())
    assert not any(MERGED in scheme.forms for scheme in SCHEMES.values())
    for layer, site in SITES.values():
        assert MERGED.macs(site.cost, ()) == site.cost.dense == counted(layer.float(), inputs_of(site))
        layer.double()


@pytest.mark.parametrize("name", FORMS)
def test_forms_are_called_what_they_are_registered_as(name: str) -> None:
    form = FORMS[name]
    assert form.name == name
    assert form.about
    assert len(set(form.axes)) == len(form.axes)
    assert RESPONSES not in form.axes[:-1]


def test_schemes_by_name_form_and_forms() -> None:
    for name, scheme in SCHEMES.items():
        assert as_scheme(name) is as_scheme(scheme) is scheme
    for form in CHOSEN.values():
        if form.name in SCHEMES:
            assert as_scheme(form) == SCHEMES[form.name]
    several = as_scheme(("spatial", FORMS["channel"]))
    assert several.forms == as_scheme("spatial+channel").forms
    assert as_scheme(several.name) == several
    assert as_scheme(dataclasses.replace(THREE_D, sweeps=2)).sweeps == 2
    for wrong in ("4d", 3, None, (), ("channel", "4d"), math.nan):
        with pytest.raises(LeanconvError, match=r"scheme=.* is not known; use 'channel', 'spatial', '3d'"):
            as_scheme(wrong)


def test_one_form_alone_is_no_scheme_of_its_name() -> None:
    alone = as_scheme((THREE_D,))
    assert alone.forms == (THREE_D,)
    assert as_scheme(alone.name) == alone
    assert as_scheme(SCHEMES["3d"].forms).name == "3d"
