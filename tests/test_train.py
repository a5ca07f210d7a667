"""Fine-tuning and distillation: what is kept, and what a killed run ends in."""

from __future__ import annotations

import copy
import functools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import random
import signal
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import leanconv
from leanconv.errors import LeanconvError
from leanconv.images import Preprocess, find_pictures
from leanconv.locked import lock_folder
from leanconv.train import finetune as finetune_module
from leanconv.train.augment import PictureSet, crop_and_flip
from leanconv.train.checkpoint import PART, Checkpoint
from leanconv.train.examples import Examples
from leanconv.train.finetune import finetune
from leanconv.train.goals import Supervised
from leanconv.train.settings import Settings
from tests.conftest import plain_network, smooth_images
from tests.training import (
    CLASSES,
    SETTINGS,
    apart,
    assert_same_bits,
    known,
    quadrants,
    small,
    tune,
    write_pictures,
)


@pytest.fixture(scope="module", autouse=True)
def _started_early() -> None:
    multiprocessing.forkserver.ensure_running()


def test_the_learning_rate_rises_and_falls() -> None:
    constant = Settings.check(**{**SETTINGS, "warmup": 4})
    assert [constant.rate(step, 10) for step in (0, 1, 3, 4, 9)] == pytest.approx([0.05, 0.1, 0.2, 0.2, 0.2])
    cosine = Settings.check(**{**SETTINGS, "warmup": 2, "schedule": "cosine"})
    # From lr behind the warm-up, through half of it in the middle, to zero at the end.
    assert [cosine.rate(step, 10) for step in (0, 1, 2, 6, 10)] == pytest.approx([0.1, 0.2, 0.2, 0.1, 0.0])
    # A run that is shorter than its warm-up still gets to lr.
    assert max(cosine.rate(step, 3) for step in range(3)) == pytest.approx(0.2)
    rates = {
        (distill, optimizer): Settings.check(**{**SETTINGS, "lr": None, "distill": distill, "optimizer": optimizer}).lr
        for distill in (False, True)
        for optimizer in (None, "adam", "muon")
    }
    assert list(rates.values()) == [1e-5, 1e-5, 2e-3, 2e-3, 3e-4, 2e-3]
    assert [Settings.check(**{**SETTINGS, "distill": d}).optimizer for d in (False, True)] == ["sgd", "muon"]


def by_hand(*, ema: float, steps: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """SGD with momentum over the same images in the same order, and the average of the weights after every step."""
    network, (images, labels) = small(), quadrants()
    speeds = {name: torch.zeros_like(value) for name, value in network.named_parameters()}
    average: dict[str, Tensor] = {}
    order = Examples((images, labels), True).training(range(96), batch=16, seed=0, epoch=0, start=0, rank=0, world=1)
    for step, batch in zip(range(steps), order, strict=False):
        decay = min(ema, (1 + step) / (10 + step))
        network.zero_grad()
        F.cross_entropy(network(batch.images), batch.labels).backward()
        for name, value in network.named_parameters():
            speeds[name] = 0.9 * speeds[name] + value.grad
            value.data -= 0.05 * speeds[name]
            new = value.detach().clone()
            average[name] = decay * average[name] + (1 - decay) * new if name in average else new
    return network, average


@pytest.mark.parametrize("ema", [0.0, 0.2, 0.9])
def test_training_is_plain_sgd_and_an_average_of_its_weights_on_request(ema: float) -> None:
    tuned = tune(epochs=1, holdout=0.0, ema=ema)
    _, average = by_hand(ema=ema, steps=6)
    for name, value in tuned.model.named_parameters():
        assert torch.allclose(value, average[name], atol=1e-5)
    assert tuned.history.rows[-1].step == tuned.history.best == 6
    assert tuned.history.verdict() == (
        "nothing was held out, so whether the network got better is not known; the weights of step 6 were kept."
    )


def test_the_best_weights_are_kept() -> None:
    validation = quadrants(64, seed=5)
    tuned = tune(epochs=5, lr=0.3, check_every=1, validation=validation)
    history = tuned.history
    assert history.best > 0
    assert max(row.held_right for row in history.rows) == history.kept.held_right > history.first.held_right
    assert len({row.held_right for row in history.rows}) > 3
    with torch.no_grad():
        scores = tuned.model(validation[0])
    assert float((scores.argmax(1) == validation[1]).float().mean()) == pytest.approx(history.kept.held_right)
    assert float(F.cross_entropy(scores, validation[1])) == pytest.approx(history.kept.held_loss, abs=1e-5)
    said = (
        f"held-out top-1 {100 * history.first.held_right:.2f} % -> {100 * history.kept.held_right:.2f} %, loss "
        f"{history.first.held_loss:.4f} -> {history.kept.held_loss:.4f}; the weights of step {history.best} were kept."
    )
    assert history.verdict() == said


def test_weights_that_cannot_get_better_stay_as_they_were_given() -> None:
    network = small()
    tuned = tune(network, quadrants()[0], copy.deepcopy(network), lr=0.1)
    assert tuned.history.best == 0
    assert tuned.history.first.held_loss == 0 < tuned.history.rows[-1].held_loss
    assert_same_bits(tuned.model, network)
    assert tuned.history.verdict().startswith("training made the network no better (held-out loss 0.0000 -> ")
    assert tuned.history.verdict().endswith("its weights stay as they were given.")


def test_nothing_of_the_user_is_touched() -> None:
    network, (images, labels) = small(0.5).train(), quadrants()
    network[0].weight.requires_grad_(False)
    before, frozen = copy.deepcopy(network), images.clone()
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    wanted = torch.rand(3).tolist(), random.random(), np.random.rand()
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    tuned = tune(network, (images, labels), augment=crop_and_flip(1))
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == wanted
    assert_same_bits(network, before)
    assert network.training
    assert all(parameter.grad is None for parameter in (*network.parameters(), *tuned.model.parameters()))
    assert torch.equal(images, frozen)
    # What the user froze stays frozen.
    assert torch.equal(tuned.model[0].weight, network[0].weight)
    assert not tuned.model[0].weight.requires_grad
    assert not torch.equal(tuned.model[5].weight, network[5].weight)


@pytest.mark.parametrize("original", [None, plain_network()])
def test_batch_norms_keep_their_statistics(original: nn.Module | None) -> None:
    network, images = plain_network(), smooth_images(32, seed=1)
    data = images if original is not None else (images, torch.arange(32) % 10)
    if original is not None:
        network[0].weight.data *= 1.5
    tuned = tune(network, data, original, ema=0.9, holdout=0.0, lr=1e-3)
    for name, buffer in network.named_buffers():
        assert torch.equal(buffer, tuned.model.get_buffer(name))
    assert not torch.equal(tuned.model[0].weight, network[0].weight)


def test_a_network_comes_back_in_its_own_precision() -> None:
    images, labels = quadrants()
    half = small().half()
    half[5].bias.data = half[5].bias.data.float()
    tuned = tune(half, (images.half(), labels), lr=0.1)
    assert tuned.history.best > 0
    assert {name: p.dtype for name, p in tuned.model.named_parameters()} == {
        name: p.dtype for name, p in half.named_parameters()
    }
    assert tune(half, images, small().bfloat16()).history.first.held_right > 0.9
    mixed = tune(small(), (images, labels), precision="bf16")
    assert mixed.history.best > 0
    assert mixed.model[0].weight.dtype == torch.float32


def test_a_network_that_was_loaded_frozen_is_trained() -> None:
    tuned = tune(small().requires_grad_(False))
    assert tuned.history.best > 0
    assert not any(parameter.requires_grad for parameter in tuned.model.parameters())


class WithAuxiliaryHead(nn.Module):
    """Answers with two tensors while it trains, as Inception does."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = small(), nn.Linear(3, CLASSES)

    def forward(self, images: Tensor) -> object:
        answer = self.net(images)
        return Two(answer, self.head(images.mean((2, 3)))) if self.training else answer


Two = namedtuple("Two", ["logits", "aux"])


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_that_are_computed_are_trained_and_averaged() -> None:
    network = small()
    network[5] = nn.utils.weight_norm(network[5])
    network(torch.zeros(1, 3, 8, 8))
    assert tune(network, ema=0.5).history.best > 0


def test_networks_with_auxiliary_heads_can_be_trained() -> None:
    torch.manual_seed(0)
    assert tune(WithAuxiliaryHead()).history.best > 0


@pytest.mark.parametrize("holdout", [0.25, 0.0])
@pytest.mark.parametrize("epochs", [1, 4])
def test_a_loss_that_is_no_number_ends_the_run_and_not_the_network(holdout: float, epochs: int) -> None:
    network, (images, labels) = known(), quadrants()
    wrong = 1e4 * images, (labels + 1) % CLASSES  # large gradients
    tuned = tune(network, wrong, lr=1e38, holdout=holdout, epochs=epochs, batch=72)
    assert "became NaN or infinite by step" in tuned.history.stopped
    assert "Try a smaller lr" in tuned.history.stopped
    assert_same_bits(tuned.model, network)
    json.dumps(tuned.history.to_json(), allow_nan=False)
    assert tuned.history.verdict().endswith("its weights stay as they were given.")


def test_a_network_of_nan_is_never_the_best() -> None:
    """Its answer is always class 0, which here is right, and that of the network given never."""
    images, _ = quadrants()
    network = small()
    network[5].bias.data[1] = 100
    tuned = tune(network, (images, torch.zeros(96, dtype=torch.int64)), lr=1e30, epochs=1, batch=86)
    assert tuned.history.first.held_right == 0
    assert_same_bits(tuned.model, network)


def test_a_collapse_is_said_plainly() -> None:
    tuned = tune(known(), lr=3.0, optimizer="adam", epochs=4, check_every=2, holdout=0.5)
    assert "held-out top-1 collapsed from" in tuned.history.stopped
    assert "lr=3 is too large" in tuned.history.stopped
    assert tuned.history.kept.held_right == max(row.held_right for row in tuned.history.rows)
    assert tuned.history.rows[-1].step < 4 * 3


def test_patience() -> None:
    network = small()
    tuned = tune(network, quadrants()[0], copy.deepcopy(network), lr=0.01, epochs=9, patience=2)
    assert tuned.history.stopped == "no better for 2 checks; training stopped at step 10."
    assert len(tuned.history.rows) == 3


# A run with everything that draws: dropout, augmentation, an average, a moving rate.
LONG = {
    "epochs": 4,
    "ema": 0.8,
    "schedule": "cosine",
    "warmup": 3,
    "augment": crop_and_flip(1),
    "checkpoint_every": 3,
    "check_every": 4,
}


def killed_at_the_fourth_checkpoint(work: Path) -> None:
    keep, count = Checkpoint.keep, 0

    def dies(self: Checkpoint, *given: dict) -> None:
        nonlocal count
        count += 1
        if count == 4:
            (self.folder / PART).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        keep(self, *given)

    Checkpoint.keep = dies
    tune(small(0.5), workdir=work, **LONG)


def test_a_killed_run_goes_on_and_ends_in_the_same_bits(tmp_path: Path) -> None:
    work = tmp_path / "work"
    assert apart(killed_at_the_fourth_checkpoint, work) == [-signal.SIGKILL]
    assert torch.load(work / "state.pt", weights_only=True)["state"]["step"] == 6
    whole = tune(small(0.5), **LONG)
    resumed = tune(small(0.5), workdir=work, **LONG)
    assert whole.history.best > 6
    assert_same_bits(whole.model, resumed.model)
    assert whole.history.rows == resumed.history.rows
    assert sorted(path.name for path in work.iterdir()) == ["state.pt"]
    # Finished: called again it gives the same, and trains no more.
    again = tune(small(0.5), workdir=work, **LONG)
    assert_same_bits(again.model, resumed.model)


def test_a_workdir_refuses_what_does_not_go_with_it(tmp_path: Path) -> None:
    work = tmp_path / "work"
    tune(workdir=work, epochs=1)
    before = (work / "state.pt").read_bytes()
    images, labels = quadrants()
    for changed, message in (
        ({"lr": 0.1}, "holds a training with lr=0.05, but lr=0.1 was given; give the same arguments"),
        ({"epochs": 3}, "epochs=1, but epochs=3 was given"),
        (
            {"augment": crop_and_flip(2)},
            r"augment=None, but augment='_CropAndFlip\(padding=2, reflect=False, mix=0.0\)' was given",
        ),
        ({"network": small().requires_grad_(False), "ema": 0.5}, "ema=0.0, but ema=0.5"),
        ({"network": known()}, "holds a training with another network, or other weights; give the same again"),
        ({"data": (images + 1, labels)}, "holds a training with other images"),
        ({"validation": (images, labels)}, "other validation images, or none"),
    ):
        with pytest.raises(LeanconvError, match=message):
            tune(**{"workdir": work, "epochs": 1, **changed})
    lock = lock_folder(work)
    with pytest.raises(LeanconvError, match="is in use by another process"):
        tune(workdir=work, epochs=1)
    os.close(lock)
    assert (work / "state.pt").read_bytes() == before
    for damaged in (before[:1000], b"", b"rubbish" * 100):
        (work / "state.pt").write_bytes(damaged)
        with pytest.raises(LeanconvError, match=r"state\.pt cannot be read \(.*\); delete the folder"):
            tune(workdir=work, epochs=1)
    torch.save({"format": "leanconv-training-0"}, work / "state.pt")
    with pytest.raises(LeanconvError, match="another version of leanconv"):
        tune(workdir=work, epochs=1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(LeanconvError, match="holds other files and no earlier training"):
        tune(workdir=tmp_path / "mine")
    with pytest.raises(LeanconvError, match="cannot be made"):
        tune(workdir=tmp_path / "mine" / "letter.txt" / "work")
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def test_pictures_read_otherwise_are_other_data(tmp_path: Path) -> None:
    write_pictures(tmp_path / "photos")
    pictures, classes = find_pictures(tmp_path / "photos"), {"left": 0, "right": 1}
    found = {
        finetune_module._digest(Examples(PictureSet(pictures[:count], prepare, classes, smallest), True))
        for count in (11, 12)
        for prepare in (Preprocess(size=8, resize=8), Preprocess(size=8, resize=9))
        for smallest in (None, 0.5)
    }
    assert len(found) == 8


class Breaks:
    """A dataset one of whose images one process cannot get."""

    images, labels = quadrants()

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if dist.get_rank() == 1 and index == 50:
            raise RuntimeError("a broken cable")
        return self.images[index], int(self.labels[index])


SHARED = {"sgd": {"optimizer": "sgd", "lr": 0.2}, "muon": {"optimizer": "muon", "lr": 0.02}}


def one_of_two(place: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name, way in SHARED.items():
        tuned, again = (tune(batch=8, check_every=1, workdir=place / name, epochs=1, **way) for _ in range(2))
        assert_same_bits(again.model, tuned.model)
        torch.save([tuned.history.to_json(), tuned.model.state_dict()], place / f"{rank}-{name}.pt")
    said = []
    for data in (Breaks(), tuple(part[: 96 - rank] for part in quadrants()), quadrants(1)):
        try:
            tune(data=data, batch=8, holdout=0.0)
        except (LeanconvError, RuntimeError) as error:
            said.append(str(error))
    try:
        tune(workdir=place)
    except LeanconvError as error:
        said.append(str(error))
    (place / f"{rank}.json").write_text(json.dumps(said))


def test_two_processes_train_as_one_and_an_error_in_one_ends_both(tmp_path: Path) -> None:
    assert apart(one_of_two, tmp_path, processes=2) == [0, 0]
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert said[0][0] == "process 1 of the job failed: a broken cable"
    for sentences in said:
        assert "process 1 was given other arguments than process 0" in sentences[1]
        assert "there are 1 images for 2 processes" in sentences[2]
        assert "holds other files and no earlier training" in sentences[3]
    for name, way in SHARED.items():
        alone = tune(batch=16, check_every=1, epochs=1, **way)
        assert alone.history.rows[-1].held_loss < alone.history.rows[0].held_loss
        for rank in range(2):
            history, weights = torch.load(tmp_path / f"{rank}-{name}.pt", weights_only=True)
            for mine, theirs in zip(alone.history.rows, history["rows"], strict=True):
                assert theirs["step"] == mine.step
                assert theirs["held_loss"] == pytest.approx(mine.held_loss, abs=1e-3)
                assert theirs["held_right"] == mine.held_right
                assert (theirs["loss"] or 0) == pytest.approx(mine.loss or 0, abs=1e-3)
            for key, value in alone.model.state_dict().items():
                assert torch.allclose(weights[key], value, atol=1e-3)


IMAGES, LABELS = quadrants(20)


REFUSALS = [
    ({"data": (IMAGES, LABELS + 3)}, r"there is a label \d, but the network has 4 outputs \(classes 0 to 3\)"),
    ({"data": (IMAGES, LABELS - 1)}, "there is a label -1, but the network has 4 outputs"),
    ({"data": IMAGES}, "the data has no labels; give pairs of image and class, or the original to learn from"),
    ({"data": (IMAGES[:0], LABELS[:0])}, "the data is empty"),
    ({"validation": (IMAGES[:0], LABELS[:0])}, "the validation data is empty"),
    ({"data": (IMAGES, LABELS[:9])}, "there are 20 images and 9 labels; give one label an image"),
    ({"data": (IMAGES, LABELS.float())}, r"the labels are torch.float32 of shape \(20,\); give one class index"),
    ({"data": (IMAGES, F.one_hot(LABELS))}, r"the labels are torch.int64 of shape \(20, \d\)"),
    ({"data": iter([IMAGES])}, "data is a list_iterator; give tensors or a dataset with a length"),
    ({"data": (IMAGES[:4], LABELS[:4])}, "holdout=0.1 of 4 images leaves none to hold out; give more images"),
    ({"holdout": 0.99}, "holdout=0.99 of 20 images leaves too few to train on"),
    ({"holdout": 1.0}, "holdout=1.0 must be a number at least 0 and under 1"),
    ({"data": (torch.zeros(20, 5, 8, 8), LABELS)}, r"the model raised RuntimeError on a batch of shape \(2, 5, 8, 8\)"),
    ({"data": (IMAGES + torch.inf, LABELS)}, "answers NaN or infinity on the images held out before any training"),
    ({"network": nn.Conv2d(3, 4, 3)}, "the model returned a Tensor of shape .* where images x classes is needed"),
    ({"network": nn.Flatten()}, "the network has no weights to train"),
    ({"network": "vgg16"}, "model is a str; give a torch.nn.Module"),
    ({"original": nn.Sequential(nn.Flatten(), nn.Linear(192, 7))}, r"the network answers \(2, 4\) where the original"),
    ({"original": 3}, "model is a int"),
    ({"epochs": 0}, "epochs=0 must be a whole number from 1"),
    ({"batch": 2.5}, "batch=2.5 must be a whole number"),
    ({"lr": -1e-5}, "lr=-1e-05 must be a number above 0"),
    ({"lr": float("nan")}, "lr=nan must be a number above 0"),
    ({"optimizer": "lbfgs"}, "optimizer='lbfgs' is not known; use 'sgd', 'adam', 'muon'"),
    ({"schedule": ["cosine"]}, "schedule=.* is not known; use 'constant', 'cosine'"),
    ({"precision": "int8"}, "precision='int8' is not known"),
    ({"ema": 1.0}, "ema=1.0 must be a number at least 0 and under 1"),
    ({"clip": -1}, "clip=-1 must be a number at least 0"),
    ({"warmup": -1}, "warmup=-1 must be a whole number"),
    ({"check_every": True}, "check_every=True must be a whole number"),
    ({"seed": 1 << 64}, "seed=18446744073709551616 must be a whole number from 0"),
    ({"workers": -1}, "workers=-1 must be a whole number from 0"),
    ({"original": small(), "features": -1, "network": "accelerated"}, "features=-1 must be a whole number"),
    ({"original": small(), "network": "accelerated"}, "original has no layer"),
    ({"device": "toaster"}, "device='toaster' cannot be used here"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSALS)
def test_bad_input_is_refused_in_one_sentence(
    changed: dict[str, object], message: str, accelerated: leanconv.Accelerated
) -> None:
    if changed.get("network") == "accelerated":
        changed = {**changed, "network": accelerated}
    with pytest.raises(LeanconvError, match=message) as caught:
        tune(**{"data": (IMAGES, LABELS), **changed})
    assert "\n" not in str(caught.value)


def test_a_plain_module_is_not_saved() -> None:
    with pytest.raises(LeanconvError, match=r"save model.state_dict\(\)"):
        tune(epochs=1).save("nowhere")
    assert Supervised.right == "top-1"


def test_one_image_more_or_less_is_no_collapse() -> None:
    """Ten images, one of them held out: it may well become wrong."""
    torch.manual_seed(0)
    network, images = nn.Sequential(nn.Flatten(), nn.Linear(12, CLASSES)), torch.randn(10, 3, 2, 2)
    labels = network(images).argmax(1)
    tuned = finetune(network, (images, (labels + 1) % CLASSES), lr=1.0, epochs=4, batch=4, progress=False)
    swapped = finetune(network, (images, labels), lr=1.0, epochs=4, batch=4, progress=False)
    assert tuned.history.stopped is None
    assert swapped.history.stopped is None


def test_functions_with_fixed_arguments_have_other_names() -> None:
    one, other = (finetune_module._named(functools.partial(torch.roll, shifts=shift)) for shift in (1, 8))
    assert one != other
