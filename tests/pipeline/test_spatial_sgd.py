"""Jaderberg's data reconstruction: responses instead of filters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import leanconv
from leanconv.pipeline import spatial_sgd as reconstruction
from leanconv.solve import spatial_basis
from leanconv.solve.spatial_sgd import Reconstruction, reconstruct
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


def test_as_a_scheme_it_does_better_than_filters_alone() -> None:
    model, images = plain_network(), smooth_images()
    plain, fitted = (
        leanconv.accelerate(model, images, 2.5, scheme=scheme, ranks="uniform", progress=False, samples=3000)
        for scheme in ("spatial", "spatial-sgd")
    )
    assert [layer.ranks for layer in plain.layers] == [layer.ranks for layer in fitted.layers]
    assert fitted.speedup == plain.speedup
    x = torch.cat(list(images)) if not isinstance(images, torch.Tensor) else images
    with torch.no_grad():
        wanted = model(x)
        distances = [float((network(x) - wanted).norm()) for network in (plain.model, fitted.model)]
    assert distances[1] < distances[0]


def test_patches_come_from_all_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is room for fewer patches than images, from images all along."""
    seen: list[tuple[int, float]] = []

    def note(patches: torch.Tensor, target: torch.Tensor, start, bias, *, seed: int) -> Reconstruction:
        seen.append((len(patches), float(patches.amax((1, 2, 3)).max())))
        return Reconstruction(start, bias, (0.0, 0.0))

    monkeypatch.setattr(reconstruction, "reconstruct", note)
    monkeypatch.setattr(reconstruction, "PATCHES", 4 * 27 * 10)  # ten patches of a 3 x 3 layer of three channels
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    images = torch.arange(60.0).reshape(60, 1, 1, 1).expand(60, 3, 8, 8).clone()
    leanconv.accelerate(network, images, 1.5, scheme="spatial-sgd", skip=[], progress=False, samples=600)
    ((count, largest),) = seen
    assert count <= 10
    assert largest >= 50
