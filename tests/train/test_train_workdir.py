"""Training with a workdir, killed or in two processes: it ends in the same weights, and other arguments are refused."""

from __future__ import annotations

import functools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from leanconv.errors import LeanconvError
from leanconv.images import Preprocess, find_pictures
from leanconv.images.loading import PictureSet
from leanconv.system.atomic_files import lock_folder
from leanconv.train import finetune as finetune_module
from leanconv.train import loop
from leanconv.train.augment import crop_and_flip
from leanconv.train.checkpoint import PART, Checkpoint
from leanconv.train.dataset import Examples
from tests.support.processes import apart
from tests.support.training import (
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
            r"augment=None, but augment='_CropAndFlip\(padding=2, reflect=False\)' was given",
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
        Examples(PictureSet(pictures[:count], prepare, classes, smallest), True).digest()
        for count in (11, 12)
        for prepare in (Preprocess(size=8, resize=8), Preprocess(size=8, resize=9))
        for smallest in (None, 0.5)
    }
    assert len(found) == 8


def test_functions_with_fixed_arguments_have_other_names() -> None:
    one, other = (finetune_module._name_of(functools.partial(torch.roll, shifts=shift)) for shift in (1, 8))
    assert one != other


# A run with everything that draws: dropout, augmentation, an average, a moving rate.
LONG = {
    "epochs": 4,
    "ema": 0.8,
    "schedule": "cosine",
    "warmup": 3,
    "augment": crop_and_flip(1),
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

    Checkpoint.keep, loop.KEEP_EVERY = dies, 3
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
        tuned, again = (tune(batch=8, workdir=place / name, epochs=2, **way) for _ in range(2))
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
        alone = tune(batch=16, epochs=2, **way)
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
