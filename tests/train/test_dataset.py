"""What is trained on: which images a step sees, what is drawn for them, and which cannot be read."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms._presets import ImageClassification

from leanconv.errors import LeanconvError
from leanconv.images import Preprocess, find_pictures
from leanconv.images.loading import PictureSet
from leanconv.train.augment import crop_and_flip
from leanconv.train.dataset import Examples, Unreadable
from tests.support.training import (
    write_pictures,
)


class Drawing:
    """A dataset whose items are their index and what each generator draws."""

    def __init__(self, count: int = 24):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, float(torch.rand(())), random.random(), np.random.rand()], dtype=torch.float64)


ORDER = {"batch": 4, "seed": 3, "epoch": 1, "start": 0, "rank": 0, "world": 1}


def rows(examples: Examples, **changed: int) -> list[list[list[float]]]:
    """Step by step, image by image."""
    indices = list(range(len(examples)))
    return [batch.images.tolist() for batch in examples.training(indices, **{**ORDER, **changed})]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_seen_and_drawn_depends_on_seed_epoch_and_index_alone(workers: int) -> None:
    whole = rows(Examples(Drawing(), False))
    examples = Examples(Drawing(), False, workers=workers)
    assert sorted(image[0] for step in whole for image in step) == list(range(24))
    assert rows(examples, start=2) == whole[2:]
    shares = [rows(examples, batch=2, world=2, rank=rank) for rank in (0, 1)]
    for step, left, right in zip(whole, *shares, strict=True):
        assert sorted(step) == sorted(left + right)
    drawn = {image[0]: image[1:] for step in whole for image in step}
    other = {image[0]: image[1:] for step in rows(examples, epoch=2) for image in step}
    assert all(drawn[index] != other[index] for index in drawn)
    assert rows(examples, epoch=2) != whole
    assert rows(examples, seed=4) != whole


def test_a_last_batch_that_is_not_full_is_left_out_of_training_and_never_of_measuring() -> None:
    examples = Examples(torch.arange(10.0)[:, None], False)
    assert [len(step) for step in rows(examples)] == [4, 4]
    assert [len(step) for step in rows(examples, batch=16)] == [10]
    seen = [
        batch.images.flatten().tolist()
        for rank in range(4)
        for batch in examples.plain(range(9), batch=2, rank=rank, world=4)
    ]
    assert sorted(index for batch in seen for index in batch) == list(range(9))
    assert all(seen)


def test_what_a_batch_draws_is_fixed_too() -> None:
    def noisy(images: Tensor) -> Tensor:
        return images + torch.rand(len(images), 1)

    examples = Examples(torch.arange(24.0)[:, None], False, noisy)
    whole = rows(examples)
    assert rows(examples, start=3) == whole[3:]
    plain = [step.images.flatten().tolist() for step in examples.plain(range(24), batch=24, rank=0, world=1)]
    assert plain == [list(range(24))]
    assert rows(examples, epoch=2) != whole


@pytest.mark.parametrize("reflect", [False, True])
def test_crop_and_flip_is_what_a_plain_loop_gives(reflect: bool) -> None:
    images = torch.randn(60, 2, 4, 5)
    changed = crop_and_flip(1, reflect=reflect)(images)
    found = set()
    for image, result in zip(images, changed, strict=True):
        for down in range(3):
            for right in range(3):
                for mirrored in (False, True):
                    plain = torch.zeros_like(image)
                    for row in range(4):
                        for column in range(5):
                            y, x = row + down - 1, (4 - column if mirrored else column) + right - 1
                            if reflect:
                                y, x = 3 - abs(3 - abs(y)), 4 - abs(4 - abs(x))
                            if 0 <= y < 4 and 0 <= x < 5:
                                plain[:, row, column] = image[:, y, x]
                    if torch.equal(plain, result):
                        found.add((down, right, mirrored))
                        break
                else:
                    continue
                break
            else:
                continue
            break
        else:
            raise AssertionError("no shift and mirroring gives this image")
    assert len(found) > 12
    with pytest.raises(LeanconvError, match="padding=-1 must be a whole number"):
        crop_and_flip(-1)


def test_pictures_are_cropped_and_mirrored_for_training_only(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    pictures = find_pictures(tmp_path)
    ways = (
        Preprocess(size=8, resize=9, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4)),
        Preprocess(transform=ImageClassification(crop_size=8, resize_size=9)),
    )
    for prepare in ways:
        examples = Examples(PictureSet(pictures, prepare, {"left": 0, "right": 1}, 0.5), True)
        (measured,) = examples.plain(range(12), batch=12, rank=0, world=1)
        assert torch.equal(measured.images, torch.stack([prepare(picture.read()) for picture in pictures]))
        assert measured.labels.tolist() == [0] * 6 + [1] * 6
        batches = [next(examples.training(range(12), **{**ORDER, "batch": 12, "epoch": e})) for e in range(8)]
        for one in batches:
            assert one.images.shape == (12, 3, 8, 8)
        # The bright half is on the side the class says, or, mirrored, on the other.
        brighter = torch.cat([(b.images[..., 5:] > b.images[..., :3]).float().mean((1, 2, 3)) > 0.5 for b in batches])
        mirrored = brighter != torch.cat([b.labels for b in batches]).bool()
        assert 0.3 < mirrored.float().mean() < 0.7


class Damaged:
    """Items that say which they are; some cannot be read."""

    def __init__(self, bad: set[int], count: int = 300):
        self.bad, self.count = bad, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index in self.bad:
            raise Unreadable(f"{index}.png", "OSError")
        return torch.tensor([float(index)]), 0


@pytest.mark.parametrize("workers", [0, 2])
def test_the_next_image_of_the_same_part_stands_for_one_that_cannot_be_read(workers: int, capsys) -> None:
    part = [index for index in range(300) if index % 10 != 6]  # every 10th is held out
    examples = Examples(Damaged({5, 99}), True, workers=workers)
    seen = [batch.images.flatten().tolist() for batch in examples.training(part, **{**ORDER, "batch": 27})]
    flat = sorted(index for step in seen for index in step)
    assert flat == sorted([index for index in part if index not in (5, 99)] + [7, 100])
    assert sorted(examples.bad) == ["5.png", "99.png"]
    assert capsys.readouterr().err.count("leanconv: warning: cannot read 5.png (OSError)") == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Damaged({1, 2, 3, 4}), r"4 of 300 images cannot be read \(.*\), more than 1 %; repair"),
        (Damaged(set(range(300))), "more than 1 %; repair or remove them"),
        ([("picture", 1)] * 20, "the dataset gives a tuple where an image, a tensor"),
        ([torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)] * 10, "images have different shapes"),
        ([(torch.zeros(3, 8, 8), "cat")] * 20, "a label is a str; give class indices"),
        ([torch.zeros(3, 8, 8)] * 20, "the data has no labels; give pairs of image and class, or the original"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_bad_items_are_one_sentence_from_workers_too(data: object, message: str, workers: int) -> None:
    with pytest.raises(LeanconvError, match=message) as caught:
        list(Examples(data, True, workers=workers).plain(range(20), batch=20, rank=0, world=1))
    assert "\n" not in str(caught.value)


def test_a_preprocessing_that_hides_its_size_cannot_be_cropped(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    hidden = Preprocess(transform=torch.nn.Identity())
    assert len(PictureSet(find_pictures(tmp_path), hidden, None)) == 12
    with pytest.raises(LeanconvError, match=r"preprocessing \(Identity\) does not say its size"):
        PictureSet(find_pictures(tmp_path), hidden, None, 0.5)
