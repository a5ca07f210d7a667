"""The stages in public: a network is analyzed once; plans are made, edited, saved and applied as often as wanted."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import leanconv
from leanconv import LeanconvError
from leanconv.forms import CHANNEL, MERGED, SPATIAL, THREE_D, Choice
from leanconv.network import reasons
from leanconv.storage.workdir import Workdir
from tests.support.equality import assert_equal, assert_same
from tests.support.networks import plain_network, residual
from tests.support.pictures import smooth_images
from tests.support.runs import accelerate
from tests.support.workdirs import ended_after

QUICK: dict[str, Any] = {"samples": 1000, "progress": False}
IMAGES = smooth_images(16)


def analyze(model: nn.Module | None = None, **arguments: Any) -> leanconv.Analysis:
    return leanconv.analyze(plain_network() if model is None else model, IMAGES, **QUICK, **arguments)


def called(speedup: float = 2.0, model: nn.Module | None = None, **arguments: Any) -> leanconv.Accelerated:
    return accelerate(plain_network() if model is None else model, IMAGES, speedup, **{**QUICK, **arguments})


@pytest.fixture(scope="module")
def analysis() -> leanconv.Analysis:
    return analyze()


@pytest.mark.parametrize(
    ("looked", "planned", "applied"),
    [
        ({}, {}, {}),
        ({"scheme": "channel"}, {"ranks": "uniform"}, {"solver": "linear"}),
        ({"scheme": "spatial"}, {}, {}),
        ({"scheme": leanconv.ThreeD(sweeps=1)}, {"ranks": "sensitivity"}, {}),
        ({"skip": ["3"], "seed": 3}, {"asymmetric": False}, {}),
        ({"samples": "auto"}, {"ranks": {"3": (9, 8), "7": (20, 16), "10": (12, 7)}}, {"refine": "none"}),
    ],
    ids=["3d", "channel", "spatial", "sweeps", "symmetric", "by hand"],
)
@pytest.mark.parametrize("build", [plain_network, residual])
def test_accelerate_is_the_chain_of_its_stages(build: Any, looked: Any, planned: Any, applied: Any) -> None:
    if build is residual and isinstance(planned.get("ranks"), dict):
        planned = {
            "ranks": {**dict.fromkeys(("a.0", "a.2", "b.2"), (9, 8)), **dict.fromkeys(("b.0", "b.4", "shortcut"), 7)}
        }
    if build is residual and "skip" in looked:
        looked = {**looked, "skip": ["a.0"]}
    given = {**QUICK, **looked}
    model, before = build(), torch.get_rng_state()
    with leanconv.analyze(model, IMAGES, **given) as looked_at:
        result = looked_at.apply(looked_at.plan(2, **planned), **applied)
    assert torch.equal(torch.get_rng_state(), before)
    whole = leanconv.accelerate(build(), IMAGES, 2, **given, **planned, **applied)
    assert_equal(whole, result)
    assert whole.options == result.options
    assert str(whole) == str(result)
    torch.testing.assert_close(model.state_dict(), build().state_dict(), rtol=0, atol=0)


def test_a_plan_is_applied_and_distilled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leanconv.train.distill.FEW", 0)  # else the call puts some images aside before it looks at them
    refine = leanconv.Distill(steps=2)
    with analyze() as looked_at:
        plan = looked_at.plan(2)
        result = looked_at.apply(plan, refine=refine)
        assert looked_at.apply(plan).training is None
    assert result.training["history"]["rows"]
    assert_equal(called(2, refine=refine), result)


def test_an_analysis_says_what_can_be_done(analysis: leanconv.Analysis) -> None:
    assert list(analysis.layers) == ["3", "7", "10"]
    assert analysis.skipped == {"0": reasons.FIRST}
    assert analysis.reachable == pytest.approx(leanconv.reachable(plain_network(), IMAGES[:1]))
    said = str(analysis)
    assert all(f"\n{name} " in said for name in analysis.layers)
    assert "as it is: 0 (" in said
    assert f"up to {analysis.reachable:.2f}x fewer MACs" in said


def test_every_plan_of_an_analysis_is_that_of_a_fresh_call(analysis: leanconv.Analysis) -> None:
    plans = {speedup: analysis.plan(speedup) for speedup in (3.0, 1.5, 2.0)}
    for speedup in (2.0, 1.5):  # in another order than they were made in
        plan, fresh = plans[speedup], called(speedup)
        result = analysis.apply(plan)
        assert speedup <= plan.speedup == result.speedup < 1.02 * speedup
        assert {name: choice.ranks for name, choice in plan.items()} == {one.name: one.ranks for one in fresh.layers}
        assert plan.macs == {one.name: one.macs_after for one in result.layers}
        assert_equal(fresh, result)
        assert result.options == fresh.options
        assert_equal(result, analysis.apply(plan))
    assert_equal(called(2.0, solver="linear"), analysis.apply(plans[2.0], solver="linear"))
    assert_equal(called(2.0), analysis.apply(plans[2.0]))  # a plan keeps what it was made for


def test_a_plan_is_edited_and_printed(analysis: leanconv.Analysis) -> None:
    plan = analysis.plan(2)
    before = plan.speedup
    plan["3"] = (7, 5)
    plan["7"] = Choice(CHANNEL, (9,))
    del plan["10"]
    assert plan["3"] == Choice(THREE_D, (7, 5))
    assert list(plan) == ["3", "7"]
    assert len(plan) == 2
    rows = {line.split()[0]: line.split() for line in str(plan).splitlines() if line}
    assert rows["3"][1:5] == ["3d", "7", "x", "5"]
    assert rows["7"][1:3] == ["channel", "9"]
    assert rows["10"][1:4] == ["as", "it", "is"]
    assert str(plan).endswith(f"{plan.speedup:.3f}x fewer MACs")
    assert plan.speedup != before
    result = analysis.apply(plan)
    assert {one.name: (one.scheme, one.ranks) for one in result.layers} == {"3": ("3d", (7, 5)), "7": ("channel", (9,))}
    assert result.skipped["10"] == reasons.NOT_NEEDED
    assert result.speedup == plan.speedup
    ranks = {"3": (7, 5), "7": Choice(CHANNEL, (9,))}
    by_hand = called(ranks=ranks)
    assert by_hand.skipped["10"] == reasons.NOT_NAMED
    # A layer less is looked at, so the streams round otherwise, and the nonlinear solver stops at another step.
    assert_same(by_hand, result, tolerance=5e-3)
    assert_same(called(ranks=ranks, solver="linear"), analysis.apply(plan, solver="linear"))


def test_ranks_by_hand_are_saved_with_their_forms(tmp_path: Path) -> None:
    ranks = {"3": (7, 5), "7": Choice(CHANNEL, (9,)), "10": Choice(THREE_D, (8, 6))}
    result = called(ranks=ranks)
    result.save(tmp_path / "net")
    again = leanconv.load_result(tmp_path / "net", plain_network())
    assert again.options == result.options
    assert again.options.ranks == ranks
    with analyze() as looked_at:
        found = looked_at.apply(looked_at.plan(ranks={**ranks, "10": Choice(THREE_D, (8, 6))}))
        assert looked_at.apply(looked_at.plan(ranks={"3": (7, 5)})).skipped["10"] == reasons.NOT_NAMED
    assert_equal(result, found)


def test_ranks_that_are_refused_leave_the_workdir_as_it_was(tmp_path: Path) -> None:
    for wrong in ({"3": (4, 400)}, {"3": "many"}, {"3": 2.5}, {"3": None}):
        with pytest.raises(LeanconvError, match=r"ranks\['3'\]"):
            called(ranks=wrong, workdir=tmp_path)
    with pytest.raises(LeanconvError, match="cannot be reached"):
        called(500, workdir=tmp_path)
    assert_equal(called(2), called(2, workdir=tmp_path))


BAD_EDITS = [
    ("33", (7, 5), r"plan names the layer '33'.*did you mean 3"),
    ("3", 7, r"ranks\['3'\] is 7; the 3d scheme takes a pair"),
    ("3", (7, 99), r"ranks\['3'\] asks for d' = 99; this layer allows 1 to 24"),
    ("3", Choice(CHANNEL, (7, 5)), r"ranks\['3'\] is \(7, 5\); channel takes whole numbers \(d'\)"),
    ("3", Choice(MERGED, ()), r"ranks\['3'\] is merged.*, a form this layer cannot take"),
]


@pytest.mark.parametrize(("name", "ranks", "message"), BAD_EDITS)
def test_a_wrong_edit_gets_one_sentence(name: str, ranks: Any, message: str, analysis: leanconv.Analysis) -> None:
    plan = analysis.plan(2)
    before = dict(plan)
    with pytest.raises(LeanconvError, match=message) as caught:
        plan[name] = ranks
    assert "\n" not in str(caught.value)
    assert dict(plan) == before


@pytest.mark.parametrize("build", [plain_network, residual])
def test_a_plan_is_saved_and_read_again(build: Any, tmp_path: Path) -> None:
    with analyze(build()) as looked_at:
        plan = looked_at.plan(3)
        name = next(iter(plan))
        plan[name] = Choice(SPATIAL, (6,))
        path = plan.save(tmp_path / "plan.json")
        for given in (path, str(path)):
            again = looked_at.plan(given)
            assert dict(again) == dict(plan)
            assert (again.pairs, again.macs, again.speedup, str(again)) == (
                plan.pairs,
                plan.macs,
                plan.speedup,
                str(plan),
            )
        assert_equal(looked_at.apply(plan), looked_at.apply(again))
    with analyze(build()) as another:  # and where the network is looked at anew
        assert str(another.plan(path)) == str(plan)


def saved(**changed: Any) -> str:
    plan = {"format": "leanconv-plan", "version": 1, "layers": {"3": ["3d", 7, 5]}, "pairs": []}
    return json.dumps({**plan, **changed})


BAD_FILES = {
    "no JSON": ("{", "is no plan"),
    "a list": ("[]", "is no plan"),
    "another file": (saved(format="leanconv"), "is no plan"),
    "another version": (saved(version=2), "is no plan"),
    "no layers": (saved(layers=[1]), "is no plan"),
    "a rank alone": (saved(layers={"3": 5}), "is no plan"),
    "a form nobody knows": (saved(layers={"3": ["4d", 5]}), "is no plan"),
    "a layer nobody knows": (saved(layers={"33": ["3d", 7, 5]}), "layer '33', which cannot be replaced"),
    "a skipped layer": (saved(layers={"0": ["channel", 5]}), "layer '0', which cannot be replaced"),
    "a rank too many": (saved(layers={"3": ["3d", 7, 5, 5]}), r"takes whole numbers \(d'', d'\)"),
    "a rank that is a word": (saved(layers={"3": ["channel", "7"]}), r"takes whole numbers \(d'\)"),
    "a rank too large": (saved(layers={"3": ["channel", 700]}), "allows 1 to 24"),
    "a form that is never chosen": (saved(layers={"3": ["merged"]}), "a form this layer cannot take"),
    "nothing": (None, "is no plan"),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_file_that_is_no_plan_gets_one_sentence(what: str, tmp_path: Path, analysis: leanconv.Analysis) -> None:
    text, message = BAD_FILES[what]
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LeanconvError, match=message) as caught:
        analysis.plan(path)
    assert "\n" not in str(caught.value)


def test_pairs_that_cannot_be_merged_are_not(tmp_path: Path, analysis: leanconv.Analysis) -> None:
    path = tmp_path / "plan.json"
    path.write_text(saved(pairs=[["3", "7"], ["3", "nowhere"]]))
    assert analysis.plan(path).pairs == []


def test_a_plan_that_cannot_be_written_gets_one_sentence(tmp_path: Path, analysis: leanconv.Analysis) -> None:
    with pytest.raises(LeanconvError, match=r"cannot write .*; choose another place\.$"):
        analysis.plan(2).save(tmp_path / "nowhere" / "plan.json")


def test_a_plan_that_cannot_be_reached_leaves_the_analysis_usable() -> None:
    with analyze() as looked_at:
        for wrong, message in ((500, "cannot be reached"), (0.5, "must be a number above 1")):
            with pytest.raises(LeanconvError, match=message):
                looked_at.plan(wrong)
        with pytest.raises(LeanconvError, match="is not known"):
            looked_at.plan(2, ranks="random")
        plan = looked_at.plan(2)
        with pytest.raises(LeanconvError, match="solver='quadratic'"):
            looked_at.apply(plan, solver="quadratic")
        result = looked_at.apply(plan)
    assert_equal(called(2), result)


def test_a_plan_of_another_network_is_refused(analysis: leanconv.Analysis) -> None:
    with analyze(residual()) as other, pytest.raises(LeanconvError, match=r"the plan names layer 'a\.0'"):
        analysis.apply(other.plan(2))


def test_with_closes_the_workdir(tmp_path: Path) -> None:
    with analyze(workdir=tmp_path) as looked_at:
        with pytest.raises(LeanconvError, match="in use by another process"):
            Workdir(tmp_path)
        result = looked_at.apply(looked_at.plan(2))
    Workdir(tmp_path).close()
    assert_equal(called(2, workdir=tmp_path), result)


def test_an_analysis_that_fails_closes_the_workdir(tmp_path: Path) -> None:
    with pytest.raises(LeanconvError, match="skip names the layer"):
        analyze(skip=["nowhere"], workdir=tmp_path)
    Workdir(tmp_path).close()


def test_several_plans_share_a_workdir(tmp_path: Path) -> None:
    """What was solved for one is not taken for another."""
    with analyze(workdir=tmp_path) as looked_at:
        plan = looked_at.plan(2)
        first = looked_at.apply(plan)
        plan["3"] = (5, 6)
        edited = looked_at.apply(plan)
        third = looked_at.apply(looked_at.plan(3))
        again = looked_at.apply(plan)
    assert_equal(called(2), first)
    assert_equal(called(3), third)
    assert_equal(edited, again)
    with analyze() as looked_at:
        plan = looked_at.plan(2)
        plan["3"] = (5, 6)
        assert_equal(looked_at.apply(plan), edited)


def test_a_plan_that_was_begun_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended after a layer and begun again by another process: solved layers of the same plan are not solved again."""
    solved: list[str] = []
    keep = Workdir.keep_solved
    monkeypatch.setattr(Workdir, "keep_solved", lambda *given: (solved.append(given[2]), keep(*given))[1])
    looked_at = analyze(workdir=tmp_path)
    plan = looked_at.plan(2)
    plan["3"] = (5, 6)
    path = plan.save(tmp_path.with_suffix(".json"))
    ended_after(1, Workdir, "keep_solved", monkeypatch, lambda: looked_at.apply(plan))
    looked_at.close()
    with analyze(workdir=tmp_path) as looked_at:
        # What the plan was made for belongs to the run.
        with pytest.raises(LeanconvError, match=r"an unfinished run with speedup=2.0, but speedup=4.0 was given"):
            looked_at.apply(looked_at.plan(path))
        looked_at.plan(2)
        result = looked_at.apply(looked_at.plan(path))
    assert solved == ["3", "7", "10"]
    assert result.speedup == plan.speedup


def test_what_is_done_to_one_result_does_not_reach_the_next() -> None:
    """Layers that stay as they are have weights of their own in every result."""
    with analyze() as looked_at:
        plan = looked_at.plan(2)
        first = looked_at.apply(plan)
        with torch.no_grad():
            for parameter in first.model.parameters():
                parameter.zero_()
        assert_equal(called(2), looked_at.apply(plan))


def test_seconds_are_those_of_one_result() -> None:
    with analyze() as looked_at:
        first = looked_at.apply(looked_at.plan(2))
        seconds = dict(first.seconds)
        second = looked_at.apply(looked_at.plan(3))
    assert first.seconds == seconds
    assert second.seconds["statistics"] == seconds["statistics"]
    assert second.seconds["solving"] != seconds["solving"]


def test_an_analysis_that_is_forgotten_gives_its_workdir_back(tmp_path: Path) -> None:
    for _ in range(2):
        looked_at = analyze(workdir=tmp_path / "work")
        assert looked_at.reachable > 1
        del looked_at
        gc.collect()
