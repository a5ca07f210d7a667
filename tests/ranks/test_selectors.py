"""Who chooses ranks: the selectors by name, one of the user's own, and a function to be made largest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import leanconv
from leanconv import LeanconvError
from leanconv.config import Options
from leanconv.forms import CHANNEL, SPATIAL, THREE_D, Choice, Choices
from leanconv.ranks import Candidate, Pairs
from leanconv.ranks.selector import SELECTORS, RankSelector, Request, selector_of
from leanconv.report import write_report
from tests.support.equality import assert_equal
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images

IMAGES = smooth_images(16)
QUICK: dict[str, Any] = {"samples": 500, "progress": False, "solver": "linear"}


def accelerate(**arguments: Any) -> leanconv.Accelerated:
    return leanconv.accelerate(plain_network(), IMAGES, **{"speedup": 2, **QUICK, **arguments})


@pytest.mark.parametrize("name", SELECTORS)
def test_every_selector_follows_the_protocol(name: str) -> None:
    selector = selector_of(name)
    assert selector.name == name
    assert selector_of(selector) is selector
    ready = selector.prepared(plain_network(), IMAGES[:2], comparable=True)
    assert (ready.name, type(ready)) == (name, type(selector))
    assert callable(ready.choose)
    assert callable(ready.final_times)
    assert type(Options.check(ranks=name).selector) is type(Options.check(ranks=selector).selector) is type(selector)
    assert Options.check(ranks=name) == Options.check(ranks=selector)
    data = json.loads(json.dumps(Options.check(ranks=name).to_json()))
    assert data["ranks"] == name
    assert Options.from_json(data) == Options.check(ranks=name)


@pytest.mark.parametrize("name", [name for name in SELECTORS if name != "latency"])
def test_a_selector_and_its_name_give_the_same_network(name: str) -> None:
    named, made = accelerate(ranks=name), accelerate(ranks=selector_of(name))
    assert named.options == made.options
    assert named.timing is None
    assert_equal(named, made)


@pytest.mark.parametrize("wrong", ["random", 3, None, object()])
def test_what_chooses_nothing_gets_one_sentence(wrong: Any) -> None:
    with pytest.raises(
        LeanconvError, match=r"ranks=.* is not known; use 'auto', 'uniform', 'energy', 'sensitivity', 'latency'"
    ):
        accelerate(ranks=wrong)


def no_spatial_filters(candidate: Candidate, choice: Choice | None) -> float:
    if choice is None:
        return 0.0
    return candidate.log_energy(choice) if choice.form is CHANNEL else -1e9


def only_few_filters(candidate: Candidate, choice: Choice | None) -> float:
    return 0.0 if choice is None else -float(choice.form.rank_on(CHANNEL.axes[0], candidate.geometry, choice.ranks))


def test_a_function_of_the_users_is_made_largest(tmp_path: Path) -> None:
    result = accelerate(ranks=no_spatial_filters)
    assert 2 <= result.speedup < 2.04
    assert {layer.scheme for layer in result.layers} == {CHANNEL.name}
    other = accelerate(ranks=only_few_filters)
    assert 2 <= other.speedup < 2.04
    assert [layer.ranks for layer in other.layers] != [layer.ranks for layer in result.layers]
    again = kept(result, tmp_path)
    assert again.options.to_json()["ranks"] == "no_spatial_filters"
    with analyzed() as analysis:
        assert_equal(result, analysis.apply(analysis.plan(2, ranks=no_spatial_filters), solver="linear"))


def analyzed() -> leanconv.Analysis:
    return leanconv.analyze(plain_network(), IMAGES, samples=500, progress=False)


def kept(result: leanconv.Accelerated, folder: Path) -> leanconv.Accelerated:
    """The same, saved and loaded, with all that is printed of it."""
    result.save(folder / "net")
    again = leanconv.load_result(folder / "net", plain_network())
    assert torch.equal(again.model(IMAGES), result.model(IMAGES))
    assert str(again) == str(result)
    name = result.options.to_json()["ranks"]
    assert json.loads((folder / "net" / "leanconv.json").read_text())["options"]["ranks"] == name
    assert name in write_report(folder / "net").read_text()
    with pytest.raises(LeanconvError, match=rf"ranks='{name}' was a selector of yours; give it again as an object"):
        again.options.selector.choose(None)  # type: ignore[arg-type]
    return again


class Halved:
    """Half of the filters of every layer, whatever was asked for."""

    name = "halved"

    def __init__(self) -> None:
        self.seen: list[Request] = []

    def prepared(self, model: nn.Module, sample: Any, *, comparable: bool) -> RankSelector:
        assert comparable
        assert sample.shape[1:] == IMAGES.shape[1:]
        return self

    def choose(self, request: Request) -> tuple[Choices, Pairs]:
        self.seen.append(request)
        chosen = {}
        for one in request.candidates:
            form = request.scheme.applicable(one.geometry)[-1]
            chosen[one.name] = Choice(form, tuple(limit // 2 for limit in form.limits(one.geometry)))
        return chosen, []

    def final_times(self, streams: Any) -> None:
        return None


def test_a_selector_of_the_users(tmp_path: Path) -> None:
    halved = Halved()
    result = accelerate(ranks=halved)
    (request,) = halved.seen
    assert [one.name for one in request.candidates] == [layer.name for layer in result.layers] == ["3", "7", "10"]
    assert all(one.spectrum(axis) for one in request.candidates for axis in THREE_D.axes)
    assert request.speedup == 2
    assert {layer.scheme for layer in result.layers} == {THREE_D.name}
    for layer, one in zip(result.layers, request.candidates, strict=True):
        assert layer.ranks == tuple(limit // 2 for limit in THREE_D.limits(one.geometry))
    assert kept(result, tmp_path).options.to_json()["ranks"] == "halved"
    with analyzed() as analysis:
        plan = analysis.plan(ranks=halved)
        assert {name: choice.ranks for name, choice in plan.items()} == {x.name: x.ranks for x in result.layers}
        assert_equal(result, analysis.apply(plan, solver="linear"))


def test_a_workdir_does_not_take_one_function_for_another_of_its_name(tmp_path: Path) -> None:
    def merit(candidate: Candidate, choice: Choice | None) -> float:
        return -1e9 if choice is not None and choice.form is not SPATIAL else 0.0

    expected = accelerate(ranks=merit)
    merit.__name__ = no_spatial_filters.__name__
    accelerate(ranks=no_spatial_filters, workdir=tmp_path)
    assert_equal(expected, accelerate(ranks=merit, workdir=tmp_path))
