"""Fine-tuning and distillation: what is trained on, what is kept, and what a killed run ends in."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import random
import signal
import socket
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms._presets import ImageClassification

import leanconv
from leanconv.cli.finetune import _classes
from leanconv.cli.main import run
from leanconv.errors import LeanconvError
from leanconv.images import Preprocess, find_pictures
from leanconv.locked import lock_folder
from leanconv.train import finetune as finetune_module
from leanconv.train.augment import PictureSet, crop_and_flip, random_views
from leanconv.train.checkpoint import PART, Checkpoint
from leanconv.train.examples import Examples, Unreadable
from leanconv.train.finetune import FineTuned, finetune
from leanconv.train.goals import Distillation, Supervised, _Distance
from leanconv.train.settings import Settings
from tests.conftest import plain_network, smooth_images
from tests.test_cli import call

CLASSES = 4

# Processes of the tests' own start from one that has imported all this once.
APART = multiprocessing.get_context("forkserver")
APART.set_forkserver_preload([__name__])


@pytest.fixture(scope="module", autouse=True)
def _started_early() -> None:
    multiprocessing.forkserver.ensure_running()


def apart(function: Callable[..., None], *given: object, processes: int = 1) -> list[int | None]:
    """Exit codes of processes that each run ``function``, with torchrun's environment where there are several."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [APART.Process(target=_apart, args=(function, given, rank, processes, port)) for rank in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
        process.kill()
    return [process.exitcode for process in started]


def _apart(function: Callable[..., None], given: tuple[object, ...], rank: int, world: int, port: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()})
    function(*given)


def quadrants(count: int = 96, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noise with one of four corners brighter, and which."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    images = torch.randn(count, 3, 8, 8, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 0.7
    return images, labels


def small(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(6 * 16, CLASSES),
    ).eval()


def tune(network: object = None, data: object = None, original: nn.Module | None = None, **other: object) -> FineTuned:
    arguments = {"epochs": 2, "batch": 16, "lr": 0.05, "progress": False, **other}
    given = small() if network is None else network
    return finetune(given, quadrants() if data is None else data, original, **arguments)  # type: ignore[arg-type]


def assert_same_bits(a: nn.Module, b: nn.Module) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


def known(network: nn.Module | None = None) -> nn.Module:
    """A network that has learnt the corners."""
    return tune(network, epochs=6, lr=0.1, holdout=0.0).model


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


def test_random_views_are_parts_of_the_images() -> None:
    """A view of a picture that rises from left to right rises or, mirrored, falls, within the picture's range; a
    brighter or darker one by at most a fifth."""
    ramp = torch.linspace(1, 2, 16).expand(64, 1, 16, 16).clone()
    torch.manual_seed(0)
    seen = random_views(0.4)(ramp)
    assert seen.shape == ramp.shape
    steps = seen.diff(dim=3).sum((1, 2, 3))
    assert (steps > 0).sum() > 10
    assert (steps < 0).sum() > 10
    assert seen.min() >= 0.8 * 1 - 1e-5
    assert seen.max() <= 1.2 * 2 + 1e-5
    assert (seen.diff(dim=2).abs() < 1e-5).all()  # a row is like the one above it
    spans = seen.amax((1, 2, 3)) - seen.amin((1, 2, 3))
    assert spans.min() > 0.8 * 0.4**0.5 * 0.9  # no part has less than 0.4 of the area


@pytest.mark.parametrize("given", [{"smallest": 0}, {"smallest": 1.5}, {"mix": -0.1}, {"mix": "half"}])
def test_views_are_shares(given: dict[str, float]) -> None:
    with pytest.raises(LeanconvError, match="must be a share from"):
        random_views(**given)


def test_mixed_views_lie_between_two_images() -> None:
    flat = torch.arange(8.0).reshape(8, 1, 1, 1).expand(8, 1, 4, 4).clone() + 1
    torch.manual_seed(0)
    seen = random_views(1.0, mix=1.0)(flat)
    assert (seen.flatten(1).std(1) < 1e-5).all()
    assert seen.min() >= 0.8
    assert seen.max() <= 1.2 * 8
    alone = random_views(1.0)(flat)[:, 0, 0, 0] / (torch.arange(8.0) + 1)
    assert ((alone >= 0.8 - 1e-5) & (alone <= 1.2 + 1e-5)).all()


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


def write_pictures(folder: Path, count: int = 12, size: int = 12) -> None:
    """PNGs of noise with a bright half, in a folder for each side."""
    generator = np.random.default_rng(0)
    for number in range(count):
        side = number % 2
        pixels = generator.integers(0, 120, (size, size, 3), dtype=np.uint8)
        pixels[:, side * size // 2 : (side + 1) * size // 2] += 100
        path = folder / ("left", "right")[side] / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)


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


SETTINGS = {
    "distill": False,
    "epochs": 1,
    "batch": 8,
    "lr": 0.2,
    "optimizer": None,
    "weight_decay": 0.0,
    "schedule": "constant",
    "warmup": 0,
    "ema": 0.0,
    "clip": 0.0,
    "precision": "off",
    "holdout": 0.1,
    "check_every": 0,
    "patience": 0,
    "checkpoint_every": 10,
    "seed": 0,
}


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


def test_distillation_is_the_divergence_of_answers_and_the_distance_of_features() -> None:
    images, original = quadrants(10)[0], small()
    other = copy.deepcopy(original)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    p, q = (torch.distributions.Categorical(logits=network(images)) for network in (original, other))
    divergence = torch.distributions.kl_divergence(p, q)
    judged = Distillation(original, [], 1.0)(other, images, None)
    assert torch.allclose(judged.loss, divergence, atol=1e-6)
    assert torch.equal(judged.right, p.logits.argmax(1) == q.logits.argmax(1))
    features = [
        (a - b).square().sum((1, 2, 3)) / a.square().sum((1, 2, 3))
        for a, b in [(original[0](images), other[0](images))]
    ]
    both = Distillation(original, ["0"], outputs=2.0)(other, images, None)
    assert torch.allclose(both.loss, 2 * divergence + features[0], atol=1e-6)
    alone = Distillation(original, ["0"], outputs=0.0)(other, images, None)
    assert torch.allclose(alone.loss, features[0], atol=1e-6)
    assert torch.equal(alone.right, judged.right)
    twin = copy.deepcopy(original)
    same = Distillation(original, ["0"], 1.0)(twin, images, None)
    assert float(same.loss.detach().abs().max()) == 0
    assert bool(same.right.all())
    same.loss.sum().backward()
    assert all(float(parameter.grad.abs().max()) < 1e-6 for parameter in twin.parameters())  # and not NaN
    # Downhill is towards the original.
    both.loss.mean().backward()
    away = [
        (mine.grad * (mine - theirs)).sum()
        for mine, theirs in zip(other.parameters(), original.parameters(), strict=True)
    ]
    assert float(sum(away).detach()) > 0


@pytest.mark.parametrize("shape", [(3, 4, 5, 6), (3, 7), (3,)])
def test_distances_have_the_slope_of_their_definition(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    wanted, size = (torch.rand(some, generator=generator, dtype=torch.float64) + 0.5 for some in (shape, (3,)))
    found = torch.rand(shape, generator=generator, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(_Distance.apply, (found, wanted, size))
    plain = (found - wanted).reshape(3, -1).square().sum(1) / size
    torch.testing.assert_close(_Distance.apply(found, wanted, size), plain)


def test_the_slope_of_a_distance_has_the_layout_and_dtype_of_its_map() -> None:
    maps = [torch.randn(2, 8, 4, 4).to(torch.bfloat16, memory_format=torch.channels_last) for _ in range(2)]
    found = maps[0].requires_grad_()
    _Distance.apply(found, maps[1], torch.ones(2)).sum().backward()
    assert found.grad is not None
    assert found.grad.dtype == torch.bfloat16
    assert found.grad.is_contiguous(memory_format=torch.channels_last)


def test_outputs_that_are_no_class_scores_are_compared_by_distance() -> None:
    images = smooth_images(6, 8)
    original, other = nn.Conv2d(3, 2, 3), nn.Conv2d(3, 2, 3)
    judged = Distillation(original, [], 1.0)(other, images, None)
    wanted, found = original(images), other(images)
    assert torch.allclose(judged.loss, (wanted - found).square().sum((1, 2, 3)) / wanted.square().sum((1, 2, 3)))
    assert judged.right is None


@pytest.fixture(scope="module")
def accelerated() -> leanconv.Accelerated:
    return leanconv.accelerate(plain_network(), smooth_images(24), 2.0, samples=1000, progress=False)


def test_features_have_the_same_meaning_with_batch_norms_folded(accelerated: leanconv.Accelerated) -> None:
    original, images = plain_network(), smooth_images(8, seed=1)
    places = finetune_module._places(accelerated.changes, 9)
    assert places == [change.batch_norm for change in accelerated.changes if not change.open]
    assert [type(original.get_submodule(place)) for place in places] == [nn.BatchNorm2d] * len(places)
    goal = Distillation(original, places, 1.0)
    from leanconv.train.goals import _watched

    with torch.no_grad(), _watched(original, places) as seen, _watched(accelerated.model, places) as seen_too:
        original(images), accelerated.model(images)
        wanted, found = ({place: maps[0] for place, maps in one.items()} for one in (seen, seen_too))
        for place in places:
            assert found[place].shape == wanted[place].shape
            assert float(found[place].min()) == float(wanted[place].min()) == 0  # behind the ReLU in place
            assert float((found[place] - wanted[place]).norm() / wanted[place].norm()) < 0.7
        distance = (
            goal(accelerated.model, images, None).loss
            - Distillation(original, [], 1.0)(accelerated.model, images, None).loss
        )
    by_hand = [(found[p] - wanted[p]).square().sum((1, 2, 3)) / wanted[p].square().sum((1, 2, 3)) for p in places]
    assert torch.allclose(distance, torch.stack(by_hand).mean(0), atol=1e-5)
    # Evenly spread, the last among them.
    assert finetune_module._places(accelerated.changes, 1) == places[-1:]
    assert finetune_module._places(accelerated.changes, 0) == []
    assert finetune_module._places(accelerated.changes, None) == finetune_module._places(accelerated.changes, 99)


def test_a_layer_for_several_maps_is_matched_on_all_of_them() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).mean((2, 3)) + self.layer(2 * x).mean((2, 3))

    torch.manual_seed(0)
    original, other, images = Twice(), Twice(), torch.rand(5, 3, 8, 8)
    with torch.no_grad():
        found = Distillation(original, ["layer"], 0.0)(other, images, None).loss
        parts = []
        for x in (images, 2 * images):
            f, g = original.layer(x).flatten(1), other.layer(x).flatten(1)
            parts.append((f - g).square().sum(1) / f.square().sum(1))
    assert torch.allclose(found, torch.stack(parts).mean(0), rtol=1e-5)


class RootHead(nn.Module):
    """A head whose slope is infinite where a feature is zero, as that of many is behind a ReLU."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.body(images)
        return features.relu().sqrt()


def test_features_alone_are_matched_where_the_answers_have_no_finite_slope() -> None:
    model = RootHead(plain_network()).eval()
    images = smooth_images(32, seed=1)
    result = leanconv.accelerate(model, images, 2.0, progress=False)
    tuned = tune(result, images, model, lr=1e-3, epochs=2)
    assert tuned.history.stopped is None
    assert tuned.history.kept.held_loss < tuned.history.first.held_loss


def test_distillation_brings_an_accelerated_network_nearer_to_the_original(
    accelerated: leanconv.Accelerated, tmp_path: Path
) -> None:
    before = copy.deepcopy(accelerated.model)
    images = smooth_images(64, seed=2)
    tuned = tune(accelerated, images, plain_network(), lr=1e-2, epochs=12)
    assert tuned.history.kept.held_loss < 0.8 * tuned.history.first.held_loss
    assert_same_bits(accelerated.model, before)
    assert not tuned.model.training
    folder = tuned.save(tmp_path / "tuned")
    again = leanconv.load_result(folder, plain_network())
    assert_same_bits(again.model, tuned.model)
    assert again.training == tuned.result.training
    assert again.training["distilled"] is True
    json.dumps(again.training, allow_nan=False)
    assert str(tuned).splitlines()[-1] == tuned.history.verdict()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_distillation_in_half_precision(accelerated: leanconv.Accelerated, precision: str) -> None:
    """Two optimizers, and in float16 a scaler of gradients for both."""
    tuned = tune(accelerated, smooth_images(64, seed=2), plain_network(), lr=1e-2, precision=precision, clip=1.0)
    assert tuned.history.kept.held_loss < 0.95 * tuned.history.first.held_loss


def test_distillation_in_double_precision(accelerated: leanconv.Accelerated) -> None:
    result = dataclasses.replace(accelerated, model=copy.deepcopy(accelerated.model).double())
    tuned = tune(result, smooth_images(64, seed=2).double(), plain_network().double(), lr=1e-2)
    assert tuned.history.kept.held_loss < 0.95 * tuned.history.first.held_loss


class _Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, slope: Tensor) -> Tensor:
        return slope * float("nan")


class OverflowingBias(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, _Overflow.apply(self.bias))


def test_an_overflow_in_some_gradients_moves_nothing() -> None:
    """In float16 a bias may overflow and the filters not: clipped together, the gradients of all would be NaN."""
    images, labels = quadrants(16)
    network = nn.Sequential(nn.Flatten(), OverflowingBias(images[0].numel(), 4))
    tuned = tune(network, (images, labels), optimizer="muon", precision="fp16", clip=1.0, epochs=1, holdout=0.0)
    assert_same_bits(tuned.model, network)


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


NETWORK = """
import torch
from torch import nn

def build(classes=2):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AvgPool2d(4), nn.Flatten(), nn.Linear(32, classes),
    )

def three():
    return build(3)
"""


def network_of(name: str) -> nn.Module:
    namespace: dict = {}
    exec(NETWORK, namespace)
    return namespace[name]()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an accelerated network, pictures and the network's code."""
    place = tmp_path_factory.mktemp("finetune")
    (place / "net.py").write_text(NETWORK)
    write_pictures(place / "photos", 40)
    prepare = Preprocess(size=8, resize=8)
    images = torch.stack([prepare(picture.read()) for picture in find_pictures(place / "photos")])
    for name in ("build", "three"):
        result = leanconv.accelerate(network_of(name), images, 1.3, samples=500, progress=False)
        finetune_module.replace(result, preprocess=prepare.to_json()).save(place / name)
    return place


@pytest.fixture
def command(saved: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(saved)
    return lambda arguments: call(f"finetune {arguments} --workers 0 --device cpu", monkeypatch, capsys)


MODEL = "--model net.py:build"


def test_finetune_with_labels(saved: Path, command, tmp_path: Path) -> None:
    arguments = f"build {MODEL} --data photos --lr 0.05 --epochs 3 --batch 8 --holdout 0.25"
    code, out, err = command(f"{arguments} --out {tmp_path / 'tuned'}")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].split("  ")[-1].strip() == "held-out top-1"
    assert len(lines) == 2 + 4 + 2
    assert "held-out top-1" in lines[-2]
    assert lines[-1] == f"saved to {tmp_path / 'tuned'}"
    assert "leanconv: fine-tuning: epoch 1.0/3, step 3" in err
    code, out, err = command(f"{arguments} --out {tmp_path / 'other'} --json --quiet")
    assert code == 0, err
    assert err == ""
    found = json.loads(out)
    assert found["folder"] == str(tmp_path / "other")
    assert [row["step"] for row in found["history"]["rows"]] == [0, 3, 6, 9]
    assert found["verdict"] == lines[-2]
    assert found["settings"]["lr"] == 0.05
    assert (found["stopped"], found["unreadable"], found["distilled"]) == (None, [], False)
    results = [leanconv.load_result(tmp_path / name, network_of("build")) for name in ("tuned", "other")]
    assert_same_bits(results[0].model, results[1].model)
    assert results[0].preprocess["size"] == 8
    assert results[0].training["history"]["rows"] == found["history"]["rows"]


def test_finetune_without_labels_and_with_folders_of_its_own_to_judge_by(saved: Path, command, tmp_path: Path) -> None:
    for part in ("train", "val"):
        write_pictures(tmp_path / "parts" / part, 24)
    (tmp_path / "flat").mkdir()
    for path in (saved / "photos" / "left").iterdir():
        (tmp_path / "flat" / path.name).write_bytes(path.read_bytes())
    for number, data in enumerate((tmp_path / "parts", tmp_path / "flat")):
        code, out, err = command(
            f"build --distill net.py:build --data {data} --lr 0.001 --epochs 2 --batch 10 --augment off --features 1 "
            f"--out {tmp_path / str(number)} --json"
        )
        assert code == 0, err
        found = json.loads(out)
        assert found["distilled"] is True
        rows = found["history"]["rows"]
        assert [row["step"] for row in rows] == ([0, 2, 4] if number == 0 else [0, 1, 2])
        assert rows[-1]["held_loss"] < rows[0]["held_loss"]


def test_finetune_passes_over_a_corrupt_image_and_says_what_went_wrong(command, tmp_path: Path) -> None:
    write_pictures(tmp_path / "photos", 100, size=8)
    (tmp_path / "photos" / "left" / "004.png").write_bytes(b"not a png")
    code, out, err = command(
        f"build {MODEL} --data {tmp_path / 'photos'} --lr 1e30 --batch 90 --out {tmp_path / 'x'} --json"
    )
    assert code == 0
    found = json.loads(out)
    assert found["unreadable"] == ["left/004.png"]
    assert err.count("warning: cannot read left/004.png (UnidentifiedImageError)") == 1
    assert "became NaN or infinite" in found["stopped"]
    assert f"leanconv: warning: {found['stopped']}" in err
    assert (tmp_path / "x" / "model.safetensors").exists()
    (tmp_path / "photos" / "left" / "006.png").write_bytes(b"")
    code, _, err = command(f"build {MODEL} --data {tmp_path / 'photos'} --lr 1e-3 --out {tmp_path / 'y'}")
    assert code == 2
    assert "2 of 100 images cannot be read" in err
    assert not (tmp_path / "y").exists()


CLI_REFUSALS = [
    (f"build {MODEL} --data photos --out photos", "exists already"),
    (f"build {MODEL} --data nowhere --out x", "does not exist"),
    (f"build {MODEL} --data empty --out x", "no images in"),
    (f"build {MODEL} --data flat --out x", "lie in no class folder (a.png); give a folder a class, or --distill"),
    ("three --model net.py:three --data photos --out x", "2 class names but the network 3 outputs"),
    (f"build {MODEL} --data photos --classes far.json --out x", "class indices must be 0 to 1; found right: 7"),
    (f"build {MODEL} --data photos --holdout 0.001 --out x", "holdout=0.001 of 40 images leaves none to hold out"),
    (f"build {MODEL} --data photos --validation others --out x", "there are validation images of up, and none"),
    (f"build {MODEL} --data photos --size 16 --out x", "the model raised RuntimeError on a batch of shape (1, 3, 16"),
    (f"build {MODEL} --data photos --lr 0 --out x", "lr=0.0 must be a number above 0"),
    (f"build {MODEL} --data photos --optimizer lion --out x", "optimizer='lion' is not known"),
    (
        f"build {MODEL} --data photos --augment 2 --out x",
        "--augment '2' must be a number above 0 and at most 1, or off",
    ),
    (f"build {MODEL} --data photos --augment on --out x", "--augment 'on' must be"),
    (f"build {MODEL} --data photos --weights none --out x", "--weights goes with --distill"),
    (f"build {MODEL} --data photos --features 2 --out x", "--features goes with --distill"),
    ("build --distill net.py:build --classes far.json --data photos --out x", "--classes does not go with --distill"),
    ("build --distill net.py:three --data photos --out x", "the network built does not fit 'build'"),
    (f"build {MODEL} --distill net.py:three --data photos --out x", "where the original answers"),
    ("build --data photos --out x", "leanconv cannot build by name"),
    ("photos --data photos --out x", "has no leanconv.json"),
    ("vgg16 --data photos --out x", "is not a folder"),
    (f"build {MODEL} --data photos --workdir photos --out x", "holds other files and no earlier training"),
]


@pytest.mark.parametrize(("arguments", "message"), CLI_REFUSALS, ids=[a for a, _ in CLI_REFUSALS])
def test_finetune_refuses_bad_input_with_one_sentence(arguments: str, message: str, saved: Path, command) -> None:
    (saved / "empty").mkdir(exist_ok=True)
    (saved / "far.json").write_text('{"left": 0, "right": 7}')
    Image.new("RGB", (8, 8)).save(saved / "photos" / "left" / "000.png")
    for path in (saved / "flat" / "a.png", saved / "others" / "up" / "a.png"):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    before = {path for path in saved.rglob("*") if "__pycache__" not in path.parts}
    code, out, err = command(arguments)
    assert code == 2
    assert message in err
    assert out == ""
    assert sum(line.startswith("leanconv: error:") for line in err.splitlines()) == 1
    assert {path for path in saved.rglob("*") if "__pycache__" not in path.parts} == before


def command_of_one(place: Path, out: Path) -> None:
    os.chdir(place)
    shown = out.with_name(f"shown-{os.environ['RANK']}")
    sys.argv = f"leanconv finetune build {MODEL} --data photos --batch 8 --epochs 1 --workers 0 --json -q".split()
    sys.argv += ["--device", "cpu", "--out", str(out)]
    with shown.open("w") as sys.stdout:
        run()


def test_finetune_under_torchrun(saved: Path, tmp_path: Path) -> None:
    assert apart(command_of_one, saved, tmp_path / "x", processes=2) == [0, 0]
    found = json.loads((tmp_path / "shown-0").read_text())
    assert found["folder"] == str(tmp_path / "x")
    assert (tmp_path / "shown-1").read_text() == ""
    assert leanconv.load_result(tmp_path / "x", network_of("build")).training["history"] == found["history"]


def test_a_map_that_is_zero_on_some_image_is_no_trouble() -> None:
    """A black picture through a network without biases."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, CLASSES, bias=False)
    )
    other = copy.deepcopy(network)
    with torch.no_grad():
        other[0].weight += 0.1 * torch.randn_like(other[0].weight)
    images = torch.randn(6, 3, 8, 8)
    images[0] = 0
    judged = Distillation(network, ["0"], 1.0)(other, images, None)
    assert judged.loss.isfinite().all()
    assert judged.loss[0] == 0
    assert (judged.loss[1:] > 0).all()


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


def test_classes_named_otherwise_where_they_are_judged_are_refused(tmp_path: Path) -> None:
    write_pictures(tmp_path / "words")
    write_pictures(tmp_path / "numbers")
    for number, word in enumerate(("left", "right")):
        (tmp_path / "numbers" / word).rename(tmp_path / "numbers" / str(number))
    words, numbers = (find_pictures(tmp_path / name) for name in ("words", "numbers"))
    with pytest.raises(LeanconvError, match="named 0, 1 where they are trained on and left, right where"):
        _classes(numbers, words, None)
    assert _classes(words, words, None) == {"left": 0, "right": 1}
    assert _classes(numbers, numbers, None) == {"0": 0, "1": 1}


def test_a_preprocessing_that_hides_its_size_cannot_be_cropped(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    hidden = Preprocess(transform=torch.nn.Identity())
    assert len(PictureSet(find_pictures(tmp_path), hidden, None)) == 12
    with pytest.raises(LeanconvError, match=r"preprocessing \(Identity\) does not say its size"):
        PictureSet(find_pictures(tmp_path), hidden, None, 0.5)
