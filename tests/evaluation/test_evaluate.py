"""Evaluating: ten views of a picture, and two networks side by side."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from leanconv import LeanconvError
from leanconv.evaluation.class_names import ClassIndices
from leanconv.evaluation.classification import answers, averaged
from leanconv.evaluation.paired import compare, kl_divergence, paired_interval
from leanconv.images import Preprocess, TenViews, find_pictures, stream
from tests.support.pictures import SMALL, encoded

# Ten views.


PRESETS = {
    "own": SMALL,
    "grey": Preprocess(size=16, resize=20, channels=1),
    "preset": Preprocess(transform=torchvision.models.get_weight("EfficientNet_B0_Weights.DEFAULT").transforms()),
}


@pytest.mark.parametrize("prepare", PRESETS.values(), ids=list(PRESETS))
def test_the_fifth_view_is_the_single_one_and_the_last_five_are_mirrored(prepare: Preprocess) -> None:
    data = encoded((60, 40))
    views, single = TenViews(prepare)(data), prepare(data)
    assert views.shape == (10, *single.shape)
    assert torch.allclose(views[4], single, atol=1e-6)
    assert torch.equal(views[5:], views[:5].flip(-1))


def test_the_first_four_views_are_the_corners() -> None:
    prepare = Preprocess(size=16, resize=24, mean=(0.0,) * 3, std=(1.0,) * 3)
    data = encoded((36, 24))
    with Image.open(io.BytesIO(data)) as picture:
        whole = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1) / 255
    views = TenViews(prepare)(data)
    corners = [
        whole[:, rows, columns] for rows in (slice(0, 16), slice(8, 24)) for columns in (slice(0, 16), slice(20, 36))
    ]
    assert torch.allclose(views[:4], torch.stack(corners))


def test_ten_views_that_cannot_be() -> None:
    with pytest.raises(LeanconvError, match="give a --resize of 16 or more"):
        TenViews(Preprocess(size=16, resize=12))
    with pytest.raises(LeanconvError, match="ten views need sizes"):
        TenViews(Preprocess(transform=lambda picture: torch.zeros(3, 4, 4)))


class Shape(nn.Module):
    """A classifier that remembers how many images it is given at a time."""

    def __init__(self, classes: int = 3, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3 * 16 * 16, classes)
        self.scale = scale
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return self.scale * self.layer(x.flatten(1))


def test_probabilities_are_averaged_over_views(shards: Path) -> None:
    found, model = find_pictures(shards), Shape()
    classes = ClassIndices({"0": 0, "1": 1, "2": 2})
    ten = TenViews(SMALL)
    (logits,), labels = answers([("net", model)], stream(found, ten, batch=3), classes, "cpu", at_once=8)
    assert max(model.seen) == 8  # 30 views of three pictures, never all at once
    expected = torch.stack([model(ten(picture.read())).softmax(1).mean(0) for picture in found])
    assert torch.allclose(logits.softmax(1), expected, atol=1e-6)
    assert torch.allclose(logits.exp(), expected, atol=1e-6)
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    same = torch.randn(4, 7).repeat_interleave(10, dim=0)
    assert torch.allclose(averaged(same, 10), same[::10].log_softmax(1), atol=1e-6)


# Two networks.


def test_networks_see_the_same_batches_decoded_once(shards: Path) -> None:
    decoded = []

    def prepare(data: bytes) -> Tensor:
        decoded.append(len(data))
        return SMALL(data)

    pictures, classes = find_pictures(shards), ClassIndices({"0": 0, "1": 1, "2": 2})
    models = [("a", Shape()), ("b", Shape(scale=2.0))]
    (a, b), labels = answers(models, stream(pictures, prepare, batch=4), classes, "cpu")
    assert len(decoded) == len(pictures)
    assert torch.allclose(2 * a, b, atol=1e-5)
    (alone,), same_labels = answers([("a", Shape())], stream(pictures, SMALL, batch=6), classes, "cpu")
    assert torch.allclose(alone, a, atol=1e-5)
    assert torch.equal(labels, same_labels)
    with pytest.raises(LeanconvError, match="a has 3 outputs and b has 4 outputs"):
        answers([("a", Shape()), ("b", Shape(4))], stream(pictures, SMALL), classes, "cpu")
    with pytest.raises(LeanconvError, match="b answers NaN or infinity on"):
        answers([("a", Shape()), ("b", Shape(scale=math.nan))], stream(pictures, SMALL), classes, "cpu")
    with pytest.raises(LeanconvError, match="b: the model raised RuntimeError"):
        answers([("a", Shape()), ("b", nn.Conv2d(1, 1, 1))], stream(pictures, SMALL), classes, "cpu")


def draw(generator: np.random.Generator, images: int, lost: float, gained: float) -> tuple[Tensor, Tensor]:
    """Correctness of two networks: the second loses some of the first's right answers and gains others."""
    kind = generator.choice(4, images, p=[lost, gained, 0.5, 0.5 - lost - gained])
    return torch.from_numpy((kind == 0) | (kind == 2)), torch.from_numpy((kind == 1) | (kind == 2))


@pytest.mark.parametrize(("lost", "gained"), [(0.1, 0.1), (0.15, 0.05)])
def test_the_interval_covers_the_truth_as_often_as_it_says(lost: float, gained: float) -> None:
    generator = np.random.default_rng(0)
    for level in (0.8, 0.95):
        intervals = [
            paired_interval(*draw(generator, 500, lost, gained), level=level, resamples=1000, seed=seed)
            for seed in range(600)
        ]
        covered = np.mean([low <= lost - gained <= high for _, low, high in intervals])
        assert abs(covered - level) < 3.5 * math.sqrt(level * (1 - level) / 600)


def test_the_interval_is_that_of_resampled_images() -> None:
    generator = np.random.default_rng(1)
    a, b = draw(generator, 300, 0.15, 0.05)
    difference = a.long() - b.long()
    means = difference[torch.from_numpy(generator.integers(0, 300, (20_000, 300)))].double().mean(dim=1)
    mean, low, high = paired_interval(a, b, resamples=20_000)
    assert mean == difference.double().mean().item()
    assert (low, high) == pytest.approx(means.quantile(torch.tensor([0.025, 0.975]).double()).tolist(), abs=1 / 300)


def test_the_interval_turns_round_with_the_networks() -> None:
    a, b = draw(np.random.default_rng(2), 400, 0.15, 0.05)
    there, back = paired_interval(a, b), paired_interval(b, a)
    assert there[0] == -back[0] > 0
    assert there[1:] == pytest.approx([-back[2], -back[1]], abs=1 / 400)
    assert paired_interval(a, b) == there
    assert paired_interval(a, a) == (0.0, 0.0, 0.0)


def test_kl_divergence_is_torchs() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(5000, 7), 3 * torch.randn(5000, 7)
    expected = F.kl_div(q.log_softmax(1), p.log_softmax(1), reduction="batchmean", log_target=True)
    assert kl_divergence(q, p) == pytest.approx(expected.item(), rel=1e-5)
    assert kl_divergence(p, p) == 0.0
    assert kl_divergence(p + 5, p) == pytest.approx(0.0, abs=1e-12)
    assert kl_divergence(q, p) != pytest.approx(kl_divergence(p, q), rel=0.01)


def test_comparison_by_hand() -> None:
    reference = torch.eye(8)[[0, 1, 2, 3]]
    other = torch.eye(8)[[0, 1, 7, 7]] + 0.5 * torch.eye(8)[[1, 2, 2, 3]]
    found = compare(reference, other, torch.arange(4), original="big", other="small")
    assert (found.top1.original, found.top1.other, found.top1.increase) == (1.0, 0.5, 0.5)
    assert found.top1.low <= 0.5 <= found.top1.high
    assert (found.top5.increase, found.top5.low, found.top5.high, found.top5.within_noise) == (0.0, 0.0, 0.0, True)
    assert found.agreement == 0.5
    assert found.kl > 0
    text = str(found)
    assert "KL(big || small)" in text
    assert "+50.00" in text
    assert "+0.00 to +0.00" in text
    data = json.loads(json.dumps(found.to_json()))
    assert data["top1"]["increase"] == 0.5
    assert data["top5"]["within_noise"] is True
    assert data["original"] == "big"


def test_a_plain_loss_is_more_than_noise() -> None:
    labels = torch.zeros(200).long()
    right, wrong = torch.tensor([1.0, 0]).expand(200, 2), torch.tensor([0.0, 1]).expand(200, 2)
    half = torch.cat([right[:100], wrong[:100]])
    found = compare(right, half, labels, original="a", other="b")
    assert not found.top1.within_noise
    assert 0.4 < found.top1.low < 0.5 < found.top1.high < 0.6
    assert found.top5.increase == 0.0  # two classes are always among the first five
