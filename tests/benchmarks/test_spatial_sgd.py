"""Jaderberg's data reconstruction: responses instead of filters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import leanconv
from benchmarks.peers import spatial_sgd
from benchmarks.peers.spatial_sgd import Reconstruction, patches_and_responses, reconstruct, train_spatial_pairs
from leanconv.solve import spatial_basis
from tests.support.equality import relative
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images


def test_descent_finds_what_the_data_shows() -> None:
    """Filters of spatial rank 3 on data that only uses one of its directions: rank 1 can be right, filters alone do
    not know it."""
    torch.manual_seed(0)
    weight = torch.randn(6, 4, 3, 3)
    direction = torch.randn(1, 4, 3, 3)
    patches = direction * torch.randn(2000, 1, 1, 1) + 0.05 * torch.randn(2000, 4, 3, 3)
    target = torch.einsum("ncij,dcij->nd", patches, weight)
    start = spatial_basis(weight).split(2)
    found = reconstruct(patches, target, start, torch.zeros(6))
    before, after = found.errors
    assert after < 0.2 * before
    again = torch.einsum("ncij,dcij->nd", patches, found.factors.product()) + found.bias
    assert abs(float((again - target).square().sum(1).mean()) / after - 1) < 1e-3


def test_a_perfect_start_stays() -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 3, 3, 3)
    patches = torch.randn(600, 3, 3, 3)
    target = torch.einsum("ncij,dcij->nd", patches, weight)
    start = spatial_basis(weight).split(9)
    found = reconstruct(patches, target, start, torch.zeros(5), steps=50)
    assert found.errors[1] <= found.errors[0] < 1e-9


def test_it_does_better_than_filters_alone() -> None:
    model, images = plain_network(), smooth_images()
    result = leanconv.accelerate(model, images, 2.5, scheme="spatial", ranks="uniform", progress=False)
    before = {key: value.clone() for key, value in result.model.state_dict().items()}
    trained = train_spatial_pairs(model, result, images, samples=3000)
    assert all(torch.equal(value, before[key]) for key, value in result.model.state_dict().items())
    with torch.no_grad():
        wanted = model(images)
        errors = [relative(network(images), wanted) for network in (result.model, trained)]
    assert errors[1] < 0.7 * errors[0]


LAYERS = {
    "plain": nn.Conv2d(3, 8, 3),
    "padded": nn.Conv2d(3, 8, 3, padding=1),
    "strided": nn.Conv2d(3, 8, 3, stride=(2, 3), padding=(0, 1)),
    "dilated": nn.Conv2d(3, 8, 3, dilation=(1, 2), padding=(0, 2)),
    "not square": nn.Conv2d(3, 8, (5, 3), padding=(2, 0)),
    "same": nn.Conv2d(3, 8, (5, 3), padding="same"),
    "reflect": nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_patches_belong_to_their_responses(name: str) -> None:
    layer, images = LAYERS[name], smooth_images(6, 12)
    network = nn.Sequential(layer, nn.BatchNorm2d(8), nn.ReLU()).eval()
    patches, responses = patches_and_responses(network, layer, layer, list(images.split(4)), samples=60, seed=0)
    assert len(patches) == 60
    answer = torch.einsum("ncij,dcij->nd", patches, layer.weight) + layer.bias
    torch.testing.assert_close(answer, responses)
    _, behind = patches_and_responses(network, layer, network[1], list(images.split(4)), samples=60, seed=0)
    torch.testing.assert_close(behind, network[1](responses[:, :, None, None])[:, :, 0, 0])


def test_patches_come_from_all_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is room for fewer patches than images, from images all along."""
    seen: list[tuple[int, float]] = []

    def note(patches: torch.Tensor, target: torch.Tensor, start, bias, *, seed: int) -> Reconstruction:
        seen.append((len(patches), float(patches.amax((1, 2, 3)).max())))
        return Reconstruction(start, bias, (0.0, 0.0))

    monkeypatch.setattr(spatial_sgd, "reconstruct", note)
    monkeypatch.setattr(spatial_sgd, "PATCHES", 4 * 27 * 10)  # ten patches of a 3 x 3 layer of three channels
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    images = torch.arange(60.0).reshape(60, 1, 1, 1).expand(60, 3, 8, 8).clone()
    result = leanconv.accelerate(network, images, 1.5, scheme="spatial", skip=[], progress=False, samples=600)
    train_spatial_pairs(network, result, images)
    ((count, largest),) = seen
    assert count == 10
    assert largest >= 50


def test_results_of_other_schemes_are_refused() -> None:
    model, images = plain_network(), smooth_images()
    result = leanconv.accelerate(model, images, 2.0, scheme="3d", ranks="energy", progress=False, samples=500)
    with pytest.raises(leanconv.LeanconvError, match="give a result of scheme='spatial'"):
        train_spatial_pairs(model, result, images)


def test_the_old_scheme_says_where_it_went() -> None:
    with pytest.raises(leanconv.LeanconvError, match=r"use scheme='spatial', .* benchmarks/peers/spatial_sgd\.py"):
        leanconv.accelerate(plain_network(), smooth_images(), 2.0, scheme="spatial-sgd")  # type: ignore[arg-type]
