"""``refine="distill"``: the accelerated network trained on the calibration images, as the last step of the call."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import leanconv
from leanconv import LeanconvError
from leanconv.calibrate.batches import Batches
from leanconv.calibrate.memory import Memory
from leanconv.cli.main import run as command
from leanconv.images.batches import Placed
from leanconv.options import Options
from leanconv.result import Accelerated
from leanconv.train import refine
from leanconv.train.augment import crop_and_flip
from leanconv.train.checkpoint import Checkpoint
from leanconv.train.finetune import finetune
from leanconv.workdir import Workdir
from tests.conftest import plain_network, relative, smooth_images
from tests.test_images import write_picture
from tests.test_workdir import assert_equal, ended_after

SIZE = 12


def network() -> nn.Module:
    return plain_network((12, 16, 16, 16))


def images(count: int = 40, seed: int = 0) -> Tensor:
    return smooth_images(count, SIZE, seed=seed)


def run(refined: str = "distill", model: nn.Module | None = None, **other: object) -> Accelerated:
    arguments: dict[str, object] = {"speedup": 2.0, "samples": 2000, "progress": False, **other}
    given = arguments.pop("images", None)
    return leanconv.accelerate(
        network() if model is None else model,
        images() if given is None else given,  # type: ignore[arg-type]
        refine=refined,  # type: ignore[arg-type]
        **arguments,  # type: ignore[arg-type]
    )


def trained_with(monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
    monkeypatch.setattr(refine, "finetune", partial(finetune, **settings))  # type: ignore[arg-type]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refine, "EPOCHS", 4)


@pytest.fixture(scope="module")
def distilled() -> Accelerated:
    return run()


@pytest.fixture(scope="module")
def closed_form() -> Accelerated:
    return run("closed-form")


def distance(result: Accelerated) -> float:
    """From the original's answers, on images nobody has seen."""
    unseen = images(100, seed=9)
    with torch.no_grad():
        return relative(result.model(unseen), network()(unseen))


def test_it_ends_nearer_to_the_original(distilled: Accelerated, closed_form: Accelerated) -> None:
    assert distance(distilled) < 0.9 * distance(closed_form)
    assert distance(distilled) < 0.9 * distance(run("none"))
    history = distilled.training["history"]
    assert history["rows"][-1]["held_loss"] < 0.9 * history["rows"][0]["held_loss"]
    assert distilled.seconds["distilling"] > 0


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
    rows = run(steps=7).training["history"]["rows"]  # two steps an epoch
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3, 4]
    with pytest.raises(LeanconvError, match="steps=7 goes with refine='distill' only"):
        run("closed-form", steps=7)
    with pytest.raises(LeanconvError, match="steps=0 must be"):
        run(steps=0)


def test_ranks_and_macs_are_those_of_the_closed_form(distilled: Accelerated, closed_form: Accelerated) -> None:
    assert distilled.layers == closed_form.layers
    assert distilled.macs_after == closed_form.macs_after
    assert distilled.parameters_after == closed_form.parameters_after
    assert distilled.options.refine == "distill"


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


def test_a_training_that_does_not_help_is_stopped_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, closed_form: Accelerated
) -> None:
    trained_with(monkeypatch, warmup=0)
    monkeypatch.setattr(refine, "LR", 1.0)
    monkeypatch.setattr(refine, "PATIENCE", 3)
    result = run()
    history = result.training["history"]
    assert history["best"] == 0
    assert history["stopped"] == "no better for 3 checks; training stopped at step 6."
    assert_equal(result, closed_form)


def test_kernels_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refine, "EPOCHS", 1)
    seen: list[nn.Module] = []
    monkeypatch.setattr("leanconv._accelerate.apply", lambda model, kernels: seen.append(model))
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
    batches = Batches(iter([Placed(0, a), Placed(12, b), Placed(30, c)]), 42)
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
    monkeypatch.setattr("leanconv.job.Job.run", lambda *_: pytest.fail("it began"))
    with pytest.raises(LeanconvError) as error:
        run(model=model(), images=given)
    assert message in str(error.value)
    assert str(error.value).count(". ") == 0
    assert "refine='closed-form'" in str(error.value)


def test_several_processes_are_sent_to_finetune() -> None:
    with pytest.raises(LeanconvError, match=r"in one process, and there are 2; use .* leanconv.finetune\(result"):
        refine.check_distillable(network(), 2)


# The workdir.


def killed_at(keep: int, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A run that ends right after its ``keep``-th checkpoint."""
    ended_after(keep, Checkpoint, "keep", monkeypatch, lambda: run(workdir=folder))


def nothing_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workdir, "keep_solved", lambda *_: pytest.fail("it was solved before"))


def test_a_run_stopped_while_it_is_trained_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refine, "EPOCHS", 8)
    whole = run()
    trained_with(monkeypatch, checkpoint_every=3)
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
    monkeypatch.setattr("leanconv.train.step.Stepper.__call__", lambda *_: pytest.fail("it was trained before"))
    assert_equal(whole, run(workdir=tmp_path))
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.usefixtures("short")
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
    trained_with(monkeypatch, checkpoint_every=1)
    ended_after(2, Checkpoint, "keep", monkeypatch, lambda: run(workdir=tmp_path, steps=4))
    with pytest.raises(LeanconvError, match="an unfinished run with steps=4, but steps=2 was given"):
        run(workdir=tmp_path, steps=2)
    assert_equal(run(steps=4), run(workdir=tmp_path, steps=4))
    fresh = run(steps=2)
    nothing_is_solved(monkeypatch)
    assert_equal(fresh, run(workdir=tmp_path, steps=2))


def test_a_folder_from_before_there_were_steps_is_as_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run("closed-form", workdir=tmp_path)
    file = tmp_path / "leanconv-work.json"
    state = json.loads(file.read_text())
    for part in ("run", "solving"):
        del state[part]["steps"]
    file.write_text(json.dumps(state))
    nothing_is_solved(monkeypatch)
    assert_equal(whole, run("closed-form", workdir=tmp_path))


@pytest.mark.parametrize(("ranks", "shared"), [("energy", True), ("uniform", True), ("latency", False)])
def test_layers_of_ranks_found_by_timing_are_not_shared(ranks: str, shared: bool, tmp_path: Path) -> None:
    """Timed again they would be other ranks."""
    work, given = Workdir(tmp_path), {"model": "a", "images": "b", "device": "cpu"}
    work.begin(given, Options.check(ranks=ranks, refine="closed-form"))
    (tmp_path / "solved").mkdir()
    work.finish()
    work.begin(given, Options.check(ranks=ranks, refine="distill"))
    assert (tmp_path / "solved").exists() is shared
    work.close()


# The command.

NETWORK = """
from tests.test_distill import network
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
