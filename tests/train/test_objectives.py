"""What training makes small: distances of responses, divergences of answers, in every precision."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import leanconv
from leanconv.train.objectives import Distillation, _Distance, feature_layers
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images
from tests.support.training import (
    CLASSES,
    assert_same_bits,
    quadrants,
    small,
    tune,
)


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


def test_features_have_the_same_meaning_with_batch_norms_folded(accelerated: leanconv.Accelerated) -> None:
    original, images = plain_network(), smooth_images(8, seed=1)
    places = feature_layers(accelerated.changes, 9)
    assert places == [change.batch_norm for change in accelerated.changes if not change.open]
    assert [type(original.get_submodule(place)) for place in places] == [nn.BatchNorm2d] * len(places)
    goal = Distillation(original, places, 1.0)
    from leanconv.train.objectives import _watched

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
    assert feature_layers(accelerated.changes, 1) == places[-1:]
    assert feature_layers(accelerated.changes, 0) == []
    assert feature_layers(accelerated.changes, None) == feature_layers(accelerated.changes, 99)


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


def test_distillation_in_half_precision(accelerated: leanconv.Accelerated) -> None:
    tuned = tune(accelerated, smooth_images(64, seed=2), plain_network(), lr=1e-2, precision="bf16", clip=1.0)
    assert tuned.history.kept.held_loss < 0.95 * tuned.history.first.held_loss


def test_distillation_in_double_precision(accelerated: leanconv.Accelerated) -> None:
    result = dataclasses.replace(accelerated, model=copy.deepcopy(accelerated.model).double())
    tuned = tune(result, smooth_images(64, seed=2).double(), plain_network().double(), lr=1e-2)
    assert tuned.history.kept.held_loss < 0.95 * tuned.history.first.held_loss


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
