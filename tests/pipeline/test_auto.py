"""The default, ranks="auto": by sensitivity where possible, else by energy; and the method of 2015 beside it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leanconv
from leanconv.calibrate.gradients import Gradients
from leanconv.pipeline import analysis as stages
from leanconv.result import Accelerated
from leanconv.storage.workdir import Workdir
from tests.support.equality import assert_equal
from tests.support.networks import plain_network, residual
from tests.support.pictures import smooth_images
from tests.support.processes import apart, together
from tests.support.runs import accelerate
from tests.support.workdirs import Killed, original_is_not_measured

IMAGES = smooth_images(48)


def run(model: nn.Module | None = None, images: Any = IMAGES, **arguments: Any) -> Accelerated:
    return accelerate(plain_network() if model is None else model, images, **arguments)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Gradients]]:
    """What was measured, each time."""
    found, usual = [], stages.measure_gradients
    monkeypatch.setattr(stages, "measure_gradients", lambda *given: found.append(usual(*given)) or found[-1])
    return found


@pytest.mark.parametrize("build", [plain_network, residual])
@pytest.mark.parametrize("more", [{}, {"scheme": "channel"}, {"solver": "linear"}, {"layers": "all"}], ids=str)
def test_the_default_is_by_sensitivity(build: Callable[[], nn.Module], more: dict[str, Any]) -> None:
    result = run(build(), **more)
    assert result.options.ranks == "auto"
    assert_equal(result, run(build(), ranks="sensitivity", **more))
    with leanconv.analyze(build(), IMAGES, samples=1000, progress=False) as looked_at:
        plans = [looked_at.plan(2, ranks=ranks) for ranks in ("auto", "sensitivity", "energy")]
    assert dict(plans[0]) == dict(plans[1]) != dict(plans[2])


@pytest.mark.parametrize("more", [{"refine": "none"}, {"asymmetric": False}, {"scheme": "spatial"}], ids=str)
def test_where_filters_are_not_fitted_to_what_they_see_it_is_by_energy(more: dict[str, Any]) -> None:
    assert_equal(run(**more), run(ranks="energy", **more))


def test_a_network_that_takes_one_precision_only_is_measured_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Gradients are taken in bfloat16 where a CPU multiplies it quickly; numpy does not know it."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = plain_network()

        def forward(self, x: Tensor) -> Tensor:
            scores = self.body(x)
            return scores + torch.from_numpy(scores.detach().numpy().mean(0))

    result = run(Shifted())
    assert "warning: ranks" not in capsys.readouterr().err
    assert_equal(result, run(Shifted(), ranks="sensitivity"))


def test_without_gradients_it_is_by_energy_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = plain_network()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).detach()

    result = run(Detached())
    assert "ranks are chosen by energy, as gradients are not to be had" in capsys.readouterr().err
    assert_equal(result, run(Detached(), ranks="energy"))
    with pytest.raises(leanconv.LeanconvError, match=r"ranks='sensitivity' needs gradients, .*; use ranks='energy'"):
        run(Detached(), ranks="sensitivity")


@pytest.mark.parametrize("build", [plain_network, residual])
@pytest.mark.parametrize("more", [{}, {"scheme": "channel"}, {"solver": "linear", "asymmetric": False}], ids=str)
def test_the_paper_is_its_fit_and_ranks_by_energy(
    build: Callable[[], nn.Module], more: dict[str, Any], measured: list[dict[str, Gradients]]
) -> None:
    quick = {"samples": 2000, "progress": False, **more}
    paper = leanconv.paper(build(), IMAGES, 2.0, **quick)
    assert not measured  # it has no use for gradients
    assert_equal(paper, run(build(), refine="none", ranks="energy", **more))
    assert (paper.options.refine, paper.options.ranks, paper.images) == ("none", "energy", 48)


def test_the_paper_reaches_four_times_by_itself() -> None:
    assert 4 <= leanconv.paper(plain_network(), IMAGES, samples=500, progress=False).speedup < 4.08


def test_gradients_are_measured_once_for_all_plans(measured: list[dict[str, Gradients]]) -> None:
    with leanconv.analyze(plain_network(), IMAGES, samples=2000, progress=False) as looked_at:
        looked_at.plan(3)
        plan = looked_at.plan(2)
        by_energy = looked_at.plan(2, ranks="energy")
        first, second = looked_at.apply(plan), looked_at.apply(by_energy)
    assert len(measured) == 1
    assert list(measured[0]) == ["3", "7", "10"]
    assert_equal(first, run())
    assert_equal(second, run(ranks="energy"))


def test_a_fit_of_ranks_by_hand_keeps_what_the_output_feels_too(measured: list[dict[str, Gradients]]) -> None:
    ranks = {"3": (9, 8), "7": (14, 12), "10": (12, 10)}
    run(ranks=ranks)
    assert len(measured) == 1
    run(ranks=ranks, refine="none")
    assert len(measured) == 1


def test_how_images_are_batched_does_not_change_what_is_measured(measured: list[dict[str, Gradients]]) -> None:
    for images in (IMAGES, list(IMAGES.split(7))):
        run(images=images)
    for one, other in zip(*(found.values() for found in measured), strict=True):
        torch.testing.assert_close(torch.tensor(one.changes), torch.tensor(other.changes), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(one.metric, other.metric, rtol=1e-4, atol=1e-8)


def killed_before(method: str, folder: str) -> None:
    """The system ends a run with a workdir where ``method`` of the workdir would begin."""
    setattr(Workdir, method, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    run(workdir=folder)


@pytest.mark.parametrize("method", ["keep_solved", "write_notes"])
def test_a_run_that_was_killed_ends_in_the_same_bits(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first layer was kept, and before anything that ranks are chosen by was."""
    whole = run()
    assert apart(killed_before, method, str(tmp_path)) == [-signal.SIGKILL]
    original_is_not_measured(monkeypatch)
    assert_equal(run(workdir=tmp_path), whole)


def test_a_run_that_ended_between_plan_and_fit_ends_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(stages, "solve_layers", ended)
        with pytest.raises(Killed):
            run(workdir=tmp_path)
    assert not list((tmp_path / "solved").glob("*.safetensors"))
    assert_equal(run(workdir=tmp_path), run())


def test_two_processes_end_with_one_network(tmp_path: Path) -> None:
    """Gradients are measured on images of the first process alone, so it is not exactly that of a single one."""
    text = f"""
batches = list(smooth_images(48).split(8))
result = leanconv.accelerate(plain_network(), batches, 2.0, samples=2000, progress=False)
torch.save([result.model.state_dict(), [vars(one) for one in result.layers]], {str(tmp_path)!r} + f"/{{rank}}")
"""
    outcome = together(text)
    assert [code for code, _ in outcome] == [0, 0], outcome
    one, other = (torch.load(tmp_path / str(rank), weights_only=False) for rank in range(2))
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=0)
    assert one[1] == other[1]
    alone = run()
    assert [layer["error"] for layer in one[1]] == pytest.approx([layer.error for layer in alone.layers], rel=0.1)


def test_a_plan_does_not_depend_on_those_before_it() -> None:
    """Ranks for splits by singular values, after ranks for splits as seen, are those of a fresh analysis."""
    with leanconv.analyze(plain_network(), IMAGES, samples=2000, progress=False) as looked_at:
        looked_at.plan(2)
        plan = looked_at.plan(2, ranks="sensitivity", asymmetric=False)
        assert_equal(looked_at.apply(plan), run(ranks="sensitivity", asymmetric=False))
