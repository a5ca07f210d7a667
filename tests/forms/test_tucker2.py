"""Tucker-2: the split of filters along their input channels, and whole runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import leanconv
from leanconv.errors import LeanconvError
from leanconv.forms import TUCKER2, Choice
from leanconv.forms.tucker2 import input_basis
from tests.support.equality import relative
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images


@pytest.mark.parametrize("shape", [(12, 8, 3, 3), (3, 20, 1, 5), (6, 10, 3), (4, 5, 2, 3, 2)])
def test_what_a_split_loses_is_the_tail_of_its_spectrum(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    basis = input_basis(weight)
    assert len(basis.values) == min(shape[1], weight.numel() // shape[1])
    assert bool((basis.values.diff() <= 1e-12).all())
    for rank in (1, len(basis.values) // 2, len(basis.values)):
        split = basis.split(rank)
        assert split.first.shape == (rank, shape[1], *[1] * (len(shape) - 2))
        lost = float((weight - split.product()).square().sum())
        assert lost == pytest.approx(float(basis.values[rank:].sum()), rel=1e-9, abs=1e-9)


def test_what_the_second_factor_sees_gives_the_responses() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 8, 3, 3, generator=generator, dtype=torch.float64)
    patches = torch.randn(40, 8, 3, 3, generator=generator, dtype=torch.float64)
    split = input_basis(weight).split(5)
    seen = split.seen(patches) @ split.second.flatten(1).T
    assert relative(seen, patches.flatten(1) @ split.product().flatten(1).T) < 1e-12


@pytest.mark.parametrize("ranks", ["energy", "uniform", "sensitivity"])
def test_a_run_meets_its_target(ranks: str) -> None:
    network, images = plain_network(), smooth_images()
    result = leanconv.accelerate(network, images, 2, scheme="tucker2", ranks=ranks, samples=1000, progress=False)
    assert 2 <= result.speedup < 2.04
    assert {layer.scheme for layer in result.layers} <= {"channel", "tucker2"}
    assert ranks == "sensitivity" or TUCKER2.name in {layer.scheme for layer in result.layers}
    assert all(layer.error < 1 for layer in result.layers)


def test_full_ranks_change_nothing() -> None:
    network, images = plain_network(), smooth_images()
    ranks = {name: (m.in_channels, m.out_channels) for name, m in network.named_modules() if isinstance(m, nn.Conv2d)}
    del ranks["0"]
    result = leanconv.accelerate(network, images, ranks=ranks, scheme="tucker2", samples=2000, progress=False)
    assert relative(result.model(images), network(images)) < 1e-4


def test_it_is_one_more_choice_beside_others(tmp_path) -> None:
    network, images = plain_network(), smooth_images()
    several = ("channel", "spatial", "3d", "tucker2")
    result = leanconv.accelerate(network, images, 2, scheme=several, ranks="sensitivity", samples=1000, progress=False)
    assert result.options.scheme == "channel+spatial+3d+tucker2"
    again = leanconv.load(result.save(tmp_path / "saved"), network)
    assert torch.equal(again(images), result.model(images))
    with pytest.raises(LeanconvError, match="ranks by energy cannot choose between 3d and tucker2"):
        leanconv.accelerate(network, images, 2, scheme=several, samples=500, progress=False, ranks="energy")


def test_asymmetric_fits_make_up_for_what_came_before() -> None:
    network, images = plain_network((16, 24, 32, 32, 32)), smooth_images(48)
    fresh = smooth_images(24, seed=7)

    def error(asymmetric: bool) -> float:
        result = leanconv.accelerate(
            network, images, 3, scheme="tucker2", asymmetric=asymmetric, samples=4000, progress=False
        )
        return relative(result.model(fresh), network(fresh))

    assert error(True) < error(False)


def test_a_choice_by_hand_names_it() -> None:
    network, images = plain_network(), smooth_images()
    result = leanconv.accelerate(network, images, ranks={"3": Choice(TUCKER2, (8, 12))}, samples=500, progress=False)
    assert [(layer.scheme, layer.ranks) for layer in result.layers] == [("tucker2", (8, 12))]
