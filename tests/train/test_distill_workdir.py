"""Distillation with a workdir: killed and called again, and what runs share."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from leanconv import LeanconvError
from leanconv.config import Distill, Options
from leanconv.pipeline import images as given
from leanconv.result import Accelerated
from leanconv.storage.workdir import Workdir
from leanconv.train import distill as refine
from leanconv.train import loop
from leanconv.train.checkpoint import Checkpoint
from tests.support.distilling import images, run
from tests.support.equality import assert_equal
from tests.support.workdirs import ended_after

# Fixtures, which pytest looks for by name in this file.


def killed_at(keep: int, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A run that ends right after its ``keep``-th checkpoint."""
    ended_after(keep, Checkpoint, "keep", monkeypatch, lambda: run(workdir=folder))


def nothing_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workdir, "keep_solved", lambda *_: pytest.fail("it was solved before"))


def test_a_run_stopped_while_it_is_trained_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refine, "EPOCHS", 8)
    whole = run()
    monkeypatch.setattr(loop, "KEEP_EVERY", 3)
    killed_at(2, monkeypatch, tmp_path)
    state = torch.load(tmp_path / "distilling" / "state.pt", weights_only=True)["state"]
    assert state["step"] == 3
    with pytest.raises(LeanconvError, match="an unfinished run with refine='distill', but refine='closed-form' was"):
        run("closed-form", workdir=tmp_path)
    nothing_is_solved(monkeypatch)
    killed_at(1, monkeypatch, tmp_path)
    again = run(workdir=tmp_path)
    assert_equal(whole, again)
    keys = ("step", "loss", "held_loss")
    rows = [[[row[key] for key in keys] for row in result.training["history"]["rows"]] for result in (whole, again)]
    assert rows[0] == rows[1]
    monkeypatch.setattr("leanconv.train.loop.Stepper.__call__", lambda *_: pytest.fail("it was trained before"))
    assert_equal(whole, run(workdir=tmp_path))
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.usefixtures("short")
def test_few_images_are_measured_anew_where_a_tenth_is_put_aside(
    tmp_path: Path, closed_form: Accelerated, caplog: pytest.LogCaptureFixture
) -> None:
    assert_equal(closed_form, run("closed-form", workdir=tmp_path))
    whole = run()
    with caplog.at_level(logging.WARNING, "leanconv"):
        assert_equal(whole, run(workdir=tmp_path))
        assert_equal(whole, run(workdir=tmp_path))
    (said,) = caplog.messages
    assert said.startswith(
        f"workdir={str(tmp_path)!r} holds what was measured on another part of these images than refine"
    )
    assert_equal(closed_form, run("closed-form", workdir=tmp_path))
    assert_equal(run(speedup=3.0), run(speedup=3.0, workdir=tmp_path))
    by_output = {"ranks": "sensitivity"}
    for refined in ("distill", "closed-form", "distill"):
        assert_equal(run(refined, **by_output), run(refined, workdir=tmp_path, **by_output))
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("killed", [None, (Workdir, "keep_solved", 1), (Checkpoint, "keep", 2)], ids=str)
def test_a_folder_from_before_any_were_put_aside(
    killed: tuple[type, str, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(refine, "FEW", 0)
        before.setattr(given, "CHECK_FROM", 1000)
        before.setattr(refine, "EPOCHS", 4)
        if killed is None:
            run(workdir=tmp_path)
        else:
            before.setattr(loop, "KEEP_EVERY", 1)
            ended_after(killed[2], killed[0], killed[1], before, lambda: run(workdir=tmp_path))
    file = tmp_path / "leanconv-work.json"
    state = json.loads(file.read_text())
    del state["basis"]["put aside"]
    file.write_text(json.dumps(state))
    monkeypatch.setattr(refine, "EPOCHS", 4)
    assert_equal(run(), run(workdir=tmp_path))


def test_an_unfinished_run_on_few_images_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended_after(2, Workdir, "keep_solved", monkeypatch, lambda: run("closed-form", workdir=tmp_path))
    with pytest.raises(LeanconvError, match="an unfinished run with refine='closed-form', but refine='distill' was"):
        run(workdir=tmp_path)
    assert len(list((tmp_path / "solved").iterdir())) == 2


@pytest.mark.usefixtures("short", "many")
def test_closed_form_and_distillation_share_what_is_solved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed_form: Accelerated
) -> None:
    assert_equal(closed_form, run("closed-form", workdir=tmp_path))
    with monkeypatch.context() as patch:
        nothing_is_solved(patch)
        assert_equal(run(), run(workdir=tmp_path))
        assert_equal(closed_form, run("closed-form", workdir=tmp_path))
    assert not (tmp_path / "distilling").exists()
    run(workdir=tmp_path)
    for refined, changed in (("distill", {"speedup": 3.0}), ("none", {"speedup": 3.0}), ("distill", {})):
        assert_equal(run(refined, **changed), run(refined, workdir=tmp_path, **changed))
    assert (tmp_path / "distilling").exists()


def test_other_steps_train_anew_what_is_solved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "KEEP_EVERY", 1)
    ended_after(2, Checkpoint, "keep", monkeypatch, lambda: run(Distill(steps=4), workdir=tmp_path))
    with pytest.raises(LeanconvError, match="an unfinished run with steps=4, but steps=2 was given"):
        run(Distill(steps=2), workdir=tmp_path)
    assert_equal(run(Distill(steps=4)), run(Distill(steps=4), workdir=tmp_path))
    fresh = run(Distill(steps=2))
    nothing_is_solved(monkeypatch)
    assert_equal(fresh, run(Distill(steps=2), workdir=tmp_path))


def test_a_folder_from_before_there_were_steps_and_sweeps_is_as_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = images(30)  # none are held out
    whole = run("closed-form", images=few, workdir=tmp_path)
    file = tmp_path / "leanconv-work.json"
    state = json.loads(file.read_text())
    for part in ("run", "solving"):
        del state[part]["steps"], state[part]["sweeps"]
    del state["basis"]["put aside"]
    file.write_text(json.dumps(state))
    nothing_is_solved(monkeypatch)
    assert_equal(whole, run("closed-form", images=few, workdir=tmp_path))


@pytest.mark.parametrize(("ranks", "shared"), [("energy", True), ("uniform", True), ("latency", False)])
def test_layers_of_ranks_found_by_timing_are_not_shared(ranks: str, shared: bool, tmp_path: Path) -> None:
    """Timed again they would be other ranks."""
    work, facts = Workdir(tmp_path), {"model": "a", "images": "b", "put aside": 0, "device": "cpu"}
    options = [Options.check(ranks=ranks, refine=refine) for refine in ("closed-form", "distill")]
    work.begin(facts, options[0])
    work.begin_run(options[0])
    (tmp_path / "solved").mkdir()
    work.finish()
    work.begin(facts, options[1])
    work.begin_run(options[1])
    assert (tmp_path / "solved").exists() is shared
    work.close()
