"""``refine="distill"``: the accelerated network trained on the calibration images, as the last step of the call."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import leanconv
from leanconv import LeanconvError
from leanconv.calibrate.batches import Batch, Batches
from leanconv.calibrate.memory import Memory
from leanconv.cli.main import run as command
from leanconv.config import Distill
from leanconv.result import Accelerated
from leanconv.train import distill as refine
from leanconv.train.augment import crop_and_flip
from tests.support.distilling import SIZE, distance, images, network, run, trained_with
from tests.support.equality import assert_equal
from tests.support.pictures import smooth_images, write_picture

# Fixtures, which pytest looks for by name in this file.


def test_it_ends_nearer_to_the_original(distilled: Accelerated, closed_form: Accelerated) -> None:
    assert distance(distilled) < distance(closed_form)  # by default the fit alone comes near
    assert distance(distilled) < 0.9 * distance(run("none"))
    assert distance(run(asymmetric=False)) < 0.8 * distance(run("closed-form", asymmetric=False))
    history = distilled.training["history"]
    assert history["rows"][-1]["held_loss"] < 0.95 * history["rows"][0]["held_loss"]
    assert distilled.seconds["distilling"] > 0


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("form", [{"scheme": "spatial"}, {"scheme": "channel"}, {"asymmetric": False}], ids=str)
def test_it_goes_with_every_scheme(form: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refine, "EPOCHS", 40)
    monkeypatch.setattr(refine, "LR", 5e-3)
    start = run("none" if form == {"scheme": "spatial"} else "closed-form", **form)
    trained = run("distill", **form)
    assert trained.layers == start.layers  # but for their weights
    assert distance(trained) < 0.95 * distance(start)


def test_few_images_are_gone_through_often_and_many_in_larger_steps() -> None:
    assert refine.course(40) == (100, 16, 2e-3)
    assert refine.course(500) == (67, 25, 2e-3)
    assert refine.course(1000) == (67, 50, 2e-3)  # 18 steps an epoch
    assert refine.course(50_000) == (6, 225, pytest.approx(2e-3 * 4.5**0.5))  # 200 steps an epoch
    assert refine.course(1_000_000)[1] == 256


def test_steps_that_were_asked_for_are_taken() -> None:
    assert refine.course(1000, 2400) == (134, 50, 2e-3)  # 18 steps an epoch
    assert refine.course(1000, 1) == (1, 50, 2e-3)
    rows = run(Distill(steps=7), images=images(48)).training["history"]["rows"]  # two steps an epoch
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3, 4]
    with pytest.raises(LeanconvError, match="steps=7 goes with refine='distill' only"), pytest.warns(FutureWarning):
        run("closed-form", steps=7)
    with pytest.raises(LeanconvError, match="steps=0 must be"):
        run(Distill(steps=0))


@pytest.mark.usefixtures("many", "short")
def test_ranks_and_macs_are_those_of_the_closed_form(closed_form: Accelerated) -> None:
    trained = run()
    assert trained.layers == closed_form.layers
    assert trained.macs_after == closed_form.macs_after
    assert trained.parameters_after == closed_form.parameters_after
    assert trained.options.refine == "distill"


@pytest.mark.usefixtures("short")
def test_same_seed_same_bits_and_nothing_of_the_user_is_touched() -> None:
    model, given = network().train(), images()
    for parameter in list(model.parameters())[:-2]:
        parameter.requires_grad_(False)  # as for a head trained on fixed features: its layers are trained all the same
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    a, b = run(model=model, images=given), run(model=model, images=given)
    assert_equal(a, b)
    assert a.training["history"]["best"] > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(given, images())
    assert model.training
    assert [parameter.requires_grad for parameter in model.parameters()][-3:] == [False, True, True]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [parameter.requires_grad for parameter in a.model.parameters()][-3:] == [False, True, True]
    other = run(model=model, images=given, seed=1)
    assert not torch.equal(other.model[3][0].weight, a.model[3][0].weight)


@pytest.mark.usefixtures("many")
def test_a_training_that_does_not_help_is_stopped_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, closed_form: Accelerated
) -> None:
    trained_with(monkeypatch, warmup=0)
    monkeypatch.setattr(refine, "LR", 1.0)
    monkeypatch.setattr(refine, "PATIENCE", 3)
    result = run()
    history = result.training["history"]
    assert history["best"] == 0
    assert history["stopped"] == "no better for 3 checks; training stopped at step 3."
    assert_equal(result, closed_form)


def test_kernels_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refine, "EPOCHS", 1)
    seen: list[nn.Module] = []
    monkeypatch.setattr("leanconv.kernels.optimize.apply", lambda model, kernels: seen.append(model))
    with pytest.warns(FutureWarning, match="kernels= is going"):
        assert run(kernels="auto").model is seen[0]


@pytest.mark.usefixtures("short")
def test_how_it_went_is_saved(tmp_path: Path) -> None:
    result = run()
    result.save(tmp_path / "net")
    again = leanconv.load_result(tmp_path / "net", network())
    assert again.training == result.training
    assert again.options.refine == "distill"
    assert_equal(again, result)


def test_images_are_moved_by_a_fourteenth_of_their_side() -> None:
    for shape, padding in (((2, 3, 224, 300), 16), ((2, 3, 32, 28), 2), ((2, 1, 8, 8), 1)):
        assert refine._augment(torch.empty(shape)) == crop_and_flip(padding, reflect=True)
    assert refine._augment(torch.empty(2, 3, 7, 20)) is None
    assert refine._augment(torch.empty(2, 3, 20)) is None


def test_all_images_that_could_be_read_are_trained_on() -> None:
    """Those that could not be are counted, and not there."""
    a, b, c = images(30).split(10)
    batches = Batches(iter([Batch(0, 10, (a,)), Batch(12, 10, (b,)), Batch(30, 10, (c,))]), 42)
    refine.check_examples(network(), ["3"], batches)
    batches.cut(7)
    assert torch.equal(refine.joined(batches, Memory(torch.device("cpu"), None)), images(30))


class Windows(nn.Module):
    """Every image as four pieces of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, images: Tensor) -> Tensor:
        half = SIZE // 2
        parts = images.unfold(2, half, half).unfold(3, half, half).permute(0, 2, 3, 1, 4, 5)
        return self.inner(parts.reshape(-1, 3, half, half)).reshape(len(images), -1)


class OfDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.inner(inputs["images"])


class WithoutGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return self.inner(images)


def detector() -> nn.Module:
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    return ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=2)


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (network, [images(20), smooth_images(20, 16)], "images of one size and dtype, and 3 x 12 x 12 float32, 3 x 16"),
        (network, images(9), "holds out a tenth of the images, and 9 were given; give at least 10, or use refine"),
        (OfDict, [{"images": images()}], "takes batches that are tensors of images, and a dict was given; use refine="),
        (detector, [[torch.rand(3, 64, 64)]], "does not train detectors, and a SSD was given; use refine='closed-f"),
        (Windows, images(), "compares feature maps image by image, and no layer of this network has such; use refine="),
        (WithoutGradients, images(), "its layers ran without gradients"),
    ],
    ids=["sizes", "few", "dict", "detector", "windows", "no_grad"],
)
def test_what_cannot_be_trained_on_is_refused_before_the_work(
    model: Callable[[], nn.Module], given: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leanconv.pipeline.analysis.Analysis.apply", lambda *_: pytest.fail("it began"))
    with pytest.raises(LeanconvError) as error:
        run(model=model(), images=given)
    assert message in str(error.value)
    assert str(error.value).count(". ") == 0
    assert "refine='closed-form'" in str(error.value)


def test_several_processes_are_sent_to_finetune() -> None:
    with pytest.raises(LeanconvError, match=r"in one process, and there are 2; use .* leanconv.finetune\(result"):
        refine.check_distillable(network(), 2)


# The command.

NETWORK = """
from tests.support.distilling import network
def build():
    return network()
"""


@pytest.mark.usefixtures("short")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(NETWORK)
    for number in range(12):
        write_picture(tmp_path / "photos" / f"{number}.png", 20 * number)
    monkeypatch.chdir(tmp_path)

    def call(more: str) -> tuple[str, str]:
        text = f"accelerate net.py:build --images photos --size {SIZE} --speedup 2 --samples 500 {more}"
        monkeypatch.setattr(sys, "argv", ["leanconv", *text.split()])
        with pytest.raises(SystemExit) as caught:
            command()
        assert not caught.value.code
        return capsys.readouterr()

    out, err = call("--refine distill --out plain")
    assert err.count("leanconv: distilling: done in") == 1
    assert "\ndistilled: " in out
    out, err = call("--refine distill --out quiet --quiet --json")
    said = json.loads(out)
    assert err == ""
    assert said["options"]["refine"] == "distill"
    assert said["training"]["distilled"]
    assert said["training"]["settings"]["epochs"] == 4
    out, _ = call("--refine distill --steps 3 --out few --quiet --json")
    assert json.loads(out)["training"]["settings"]["epochs"] == 3  # of one step
