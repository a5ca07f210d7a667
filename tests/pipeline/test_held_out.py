"""What a result says about images it was not fitted to."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leanconv
from leanconv.calibrate.batches import take
from leanconv.evaluation.classification import agreement
from leanconv.evaluation.held_out import FARTHEST, Differences, normal, wilson
from leanconv.evaluation.held_out import together as compared
from leanconv.evaluation.paired import kl_divergence
from leanconv.pipeline.images import check_count
from leanconv.result import HeldOut
from leanconv.train import distill as refine
from tests.pinned import networks
from tests.pinned.cells import CELLS, FOLDERS
from tests.pinned.machine import FOLDERS as SAVED
from tests.support.equality import assert_equal
from tests.support.processes import together

IMAGES = networks.images(60)


def run(images: Any = IMAGES, speedup: float = 2.0, model: nn.Module | None = None, **more: Any) -> Any:
    arguments = {"samples": 1000, "progress": False, **more}
    return leanconv.accelerate(networks.residual() if model is None else model, images, speedup, **arguments)


def held_out(count: int, seed: int = 0) -> list[int]:
    """Which of so many images a run leaves out."""
    batches = take(torch.arange(float(count)).reshape(count, 1))
    batches.put_aside(check_count(count), seed)
    return [int(index) for index in torch.cat(batches.aside).flatten()]


@pytest.fixture(scope="module")
def result() -> leanconv.Accelerated:
    return run()


class Several(nn.Module):
    """A network that returns a dictionary of tensors under these names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.body, self.names = networks.residual(), names

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = self.body(x)
        return {name: (1 + number) * found for number, name in enumerate(self.names)}


def segmenter() -> nn.Module:
    network = networks.residual()
    head = networks.filled(nn.Conv2d(24, 5, 1))
    return nn.Sequential(network.stem, network.blocks, head).eval()  # type: ignore[arg-type]


def test_a_tenth_between_8_and_128_and_none_of_few() -> None:
    counts = {31: 0, 32: 8, 80: 8, 300: 30, 1000: 100, 5000: 128}
    assert {images: check_count(images) for images in counts} == counts


@pytest.mark.parametrize("refined", ["closed-form", leanconv.Distill(steps=3)])
@pytest.mark.parametrize("few", [True, False])
def test_nothing_is_fitted_to_them(refined: Any, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refine, "FEW", 500 if few else 0)
    changed = IMAGES.clone()
    changed[held_out(60)] = 10 * networks.images(8, seed=5)
    arguments = {"refine": refined, "ranks": "sensitivity"}
    one, other = run(**arguments), run(changed, **arguments)
    assert_equal(one, other)
    assert one.check.relative_error != other.check.relative_error
    assert (one.images, one.check.images, one.check.seen) == (60, 8, False)


@pytest.mark.parametrize("cut", [1, 7, 60])
def test_they_are_drawn_by_the_seed_however_images_are_batched(cut: int) -> None:
    """Of splits of filters, which nothing is fitted to: fits round otherwise where single images come in."""
    checks = [run(images, scheme="spatial").check for images in (list(IMAGES.split(cut)), IMAGES)]
    assert checks[0].kl == pytest.approx(checks[1].kl, rel=1e-3)
    assert held_out(60) != held_out(60, seed=1)


def test_numbers_are_those_of_evaluate(result: leanconv.Accelerated) -> None:
    images, original = IMAGES[held_out(60)], networks.residual()
    with torch.no_grad():
        ours, theirs = result.model(images), original(images)
    check = result.check
    assert check.agreement == agreement(ours, theirs)
    assert check.kl == pytest.approx(kl_divergence(ours, theirs), rel=1e-3)
    off = (ours - theirs).norm(dim=1).sum() / theirs.norm(dim=1).sum()
    assert check.relative_error == pytest.approx(float(off), rel=1e-3)
    assert check.agreement_interval == wilson(8 * check.agreement, 8)
    assert check.kl_interval[0] < check.kl < check.kl_interval[1]


def test_intervals() -> None:
    assert wilson(0, 8) == (0.0, pytest.approx(0.324, abs=1e-3))
    assert wilson(93, 100) == (pytest.approx(0.863, abs=1e-3), pytest.approx(0.966, abs=1e-3))
    low, high = wilson(8, 8)
    assert (high, low) == (1.0, pytest.approx(0.676, abs=1e-3))
    assert normal([1.0, 3.0]) == (pytest.approx(2 - 1.96), pytest.approx(2 + 1.96))
    assert normal([0.0, 3.0], most=2.0) == (0.0, 2.0)
    assert normal([0.3]) is None


@pytest.mark.parametrize(
    ("images", "more", "seen", "count"),
    [
        (31, {}, True, 31),
        (1, {}, True, 1),
        (60, {"refine": "none"}, True, 32),
        (60, {"scheme": "spatial"}, False, 8),
    ],
)
def test_where_none_are_held_out_it_says_so(images: int, more: Any, seen: bool, count: int) -> None:
    result = run(IMAGES[:images], **more)
    assert (result.check.seen, result.check.images, result.images) == (seen, count, images)
    assert ("it was made with (none were held out)" in str(result)) is seen


def test_inputs_that_cannot_be_taken_apart_stay_whole() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = networks.residual()

        def forward(self, given: dict[str, Tensor]) -> Tensor:
            return self.body(given["images"]) * given["scale"].mean()

    batches = [{"images": part, "scale": torch.ones(3)} for part in IMAGES.split(20)]
    found = run([{**batch, "scale": torch.ones(2)} for batch in batches], model=Scaled())
    assert (found.images, found.check.seen) == (60, True)
    found = run([{**batch, "scale": torch.ones(20)} for batch in batches], model=Scaled())
    assert (found.images, found.check.images, found.check.seen) == (60, 8, False)


def test_outputs_of_other_kinds() -> None:
    maps = run(model=segmenter()).check
    assert f"same class on {100 * maps.agreement:.1f} % of the pixels" in str(maps)
    assert maps.agreement_interval[0] <= maps.agreement <= maps.agreement_interval[1]
    plain, pair, named = (  # split by their weights alone: other outputs have other gradients
        run(model=model, scheme="spatial").check
        for model in (networks.residual(), Several("a", "b"), Several("logits", "b"))
    )
    assert pair.relative_error == pytest.approx(plain.relative_error, rel=1e-3)
    assert (pair.agreement, pair.kl) == (None, None)
    assert (named.agreement, named.kl) == (plain.agreement, pytest.approx(plain.kl, rel=1e-3))


def test_it_fails_no_run(caplog: pytest.LogCaptureFixture, result: leanconv.Accelerated) -> None:
    spoilt = IMAGES.clone()
    spoilt[held_out(60)] = torch.nan
    with caplog.at_level(logging.WARNING, "leanconv"):
        found = run(spoilt)
    assert found.check is None
    assert "the accelerated network was not compared with the original" in caplog.text
    assert_equal(found, result)


def test_a_network_that_returns_nan_is_far() -> None:
    found, outputs = Differences(), torch.rand(8, 10)
    found.add(outputs, torch.full_like(outputs, torch.nan), 8)
    check = compared([found], seen=False)
    assert (check.relative_error, check.kl, check.poor) == (FARTHEST, FARTHEST, True)


def test_it_is_printed_and_says_what_to_do_where_it_is_poor(result: leanconv.Accelerated) -> None:
    shown = HeldOut(100, 0.21, False, 0.93, (0.8628, 0.9657), 0.12, (0.09, 0.15))
    line = "on 100 images it was not fitted to: same class 93.0 % (86.3 to 96.6), KL 0.120 (0.090 to 0.150), "
    assert str(shown) == f"{line}outputs 21.0 % off"
    assert str(result.check) in str(result)
    assert not result.check.poor
    assert "far from the original" not in str(result)
    ruined = run(scheme="spatial")
    assert ruined.check.poor
    (advice,) = [line for line in str(ruined).splitlines() if line.startswith("That is far from the original: try a")]
    worst = sorted(ruined.layers, key=lambda layer: layer.error)[-3:]
    assert all(f"'{layer.name}'" in advice for layer in worst)
    assert "skip=['stem.0', " in advice  # the layer that is left alone already
    assert 'refine="distill"' in advice
    assert "ranks=" not in advice
    assert 'or ranks="sensitivity", or' in str(run(scheme="spatial", ranks="energy"))


@pytest.mark.parametrize(
    ("check", "poor"),
    [
        (HeldOut(8, 0.2, False), False),
        (HeldOut(8, 0.4, False), True),
        (HeldOut(8, 0.4, False, 0.9, None, 0.1), False),
        (HeldOut(8, 0.1, False, 0.9, None, 0.3), True),
        (HeldOut(8, 0.1, False, 0.6, None, 0.1), True),
    ],
)
def test_what_is_poor(check: HeldOut, poor: bool) -> None:
    assert check.poor is poor


def test_it_is_saved_and_gone_after_training(tmp_path: Path, result: leanconv.Accelerated) -> None:
    folder = result.save(tmp_path / "net")
    assert leanconv.load_result(folder, networks.residual()).check == result.check
    assert json.loads((folder / "leanconv.json").read_text())["check"]["kl"] == result.check.kl
    tuned = leanconv.finetune(result, IMAGES, networks.residual(), epochs=1, batch=20, progress=False)
    assert tuned.result.check is None


def test_folders_from_before_have_none() -> None:
    assert leanconv.load_result(SAVED / "channel", CELLS[FOLDERS["channel"]].network()).check is None


def test_processes_hold_out_what_one_does(tmp_path: Path) -> None:
    text = f"""
from tests.pinned import networks
batches = list(networks.images(60).split(10))
result = leanconv.accelerate(networks.residual(), batches, 2.0, samples=1000, progress=False)
torch.save([vars(result.check), result.images, result.model], {str(tmp_path)!r} + f"/{{rank}}")
"""
    outcome = together(text)
    assert [code for code, _ in outcome] == [0, 0], outcome
    images = IMAGES[held_out(60)]
    for rank in range(2):
        check, count, model = torch.load(tmp_path / str(rank), weights_only=False)
        assert (check["images"], count, check["seen"]) == (8, 60, False)
        with torch.no_grad():
            kl = kl_divergence(model(images), networks.residual()(images))
        assert check["kl"] == pytest.approx(kl, rel=1e-3)


def test_buffers_are_as_they_were() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = networks.residual()
            self.register_buffer("runs", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            return self.body(x)

    result = run(model=Counting())
    assert result.check is not None
    assert float(result.model.runs) == 0.0


def test_a_workdir_serves_only_runs_that_are_fitted_to_the_same_images(
    tmp_path: Path, result: leanconv.Accelerated, caplog: pytest.LogCaptureFixture
) -> None:
    assert_equal(run(workdir=tmp_path), result)
    with caplog.at_level(logging.WARNING, "leanconv"):
        assert_equal(run(workdir=tmp_path, scheme="spatial"), run(scheme="spatial"))
        assert not caplog.messages
        assert_equal(run(workdir=tmp_path, refine="none"), run(refine="none"))
    assert "another part of these images than refine='none'" in caplog.text
    again = run(workdir=tmp_path)
    assert_equal(again, result)
    assert again.check == result.check
    with pytest.raises(leanconv.LeanconvError, match="other images or batches"):
        run(IMAGES.flip(0), workdir=tmp_path)
