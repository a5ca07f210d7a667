"""Patches and responses at sampled positions equal what the layer computes there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from leanconv.calibrate.batches import take
from leanconv.calibrate.observe import observe
from leanconv.calibrate.positions import Positions, choose_positions, conv_patches, outputs_at
from leanconv.calibrate.probes import Probe
from leanconv.calibrate.samples import Rows
from leanconv.network.fold import folded
from leanconv.network.survey import survey
from tests.support.networks import CONV_CASES, network_of, plain_network
from tests.support.pictures import smooth_images


def responses_of(model: nn.Module, probe: Probe, images: torch.Tensor, samples: int) -> torch.Tensor:
    found: list[torch.Tensor] = []
    cpu = torch.device("cpu")
    positions = Positions(per_image=-(-samples // len(images)), images=len(images), seed=0, device=cpu)
    observe(
        model,
        take(images),
        [probe],
        positions=positions,
        device=cpu,
        take=lambda name, first, responses: found.append(responses.y),
    )
    return torch.cat(found)


def all_responses(model: nn.Module, name: str, images: torch.Tensor, samples: int) -> torch.Tensor:
    site = next(site for site in survey(model, images[:1]).sites if site.name == name)
    probe = Probe(site, *folded(model, site, torch.float32))
    return responses_of(model, probe, images, samples)


@pytest.mark.parametrize("case", CONV_CASES)
def test_responses_are_the_layers_own(case: str) -> None:
    model, images = network_of(CONV_CASES[case]), smooth_images(5)
    expected = model[:4](images).permute(0, 2, 3, 1).flatten(0, 2)  # up to the batch norm
    found = all_responses(model, "2", images, samples=10**6)
    assert torch.allclose(found, expected, atol=1e-5)


def test_samples_are_a_subset_of_all_and_the_same_every_time() -> None:
    model, images = plain_network(), smooth_images(10)
    every = all_responses(model, "3", images, samples=10**6)
    some = all_responses(model, "3", images, samples=200)
    assert len(some) == 200
    distance = torch.cdist(some, every).min(dim=1).values
    assert distance.max() < 1e-3
    assert torch.equal(some, all_responses(model, "3", images, samples=200))


def test_an_operation_in_place_does_not_spoil_responses() -> None:
    model = plain_network()
    copy = plain_network()
    for module in copy:
        if isinstance(module, nn.ReLU):
            module.inplace = False
    images = smooth_images(6)
    assert torch.equal(all_responses(model, "7", images, 300), all_responses(copy, "7", images, 300))


@pytest.mark.parametrize("case", CONV_CASES)
@pytest.mark.parametrize("per_image", [7, 10**6])
def test_rows_of_channels_last_maps_are_those_of_contiguous_ones(case: str, per_image: int) -> None:
    model, images = network_of(CONV_CASES[case]), smooth_images(5)
    site = next(site for site in survey(model, images[:1]).sites if site.name == "2")
    positions = Positions(per_image=per_image, images=5, seed=0, device=torch.device("cpu"))
    with torch.no_grad():
        x = model[:2](images)
        y = model[2](x)
    chosen = positions.choose(y[0, 0].numel(), 0, 5, images=True)
    last_x, last_y = (maps.to(memory_format=torch.channels_last) for maps in (x, y))
    assert torch.equal(conv_patches(last_x, site.geometry, chosen), conv_patches(x, site.geometry, chosen))
    rows = outputs_at(y, "conv2d", chosen)
    assert torch.equal(rows, y.flatten(2).gather(2, chosen.at[:, None].expand(-1, y.shape[1], -1)).mT.flatten(0, 1))
    found = outputs_at(last_y, "conv2d", chosen)
    last_y.zero_()  # as a network may that works in place
    assert torch.equal(found, rows)


def test_positions_are_distinct_where_the_map_is_small_and_spread_over_it() -> None:
    chosen = choose_positions(50, 20, 10, (0, 1, 2))
    assert all(len(set(row.tolist())) == 10 for row in chosen)
    positions = Positions(per_image=10, images=3, seed=0, device=torch.device("cpu"))
    assert torch.equal(positions.choose(12, 0, 3, images=True).at, torch.arange(12).expand(3, 12))
    counts = torch.bincount(choose_positions(2000, 1000, 10, (0, 0, 0)).flatten(), minlength=1000)
    assert counts.float().std() < 2 * 20**0.5
    assert not torch.equal(choose_positions(5, 100, 3, (0, 1, 0)), choose_positions(5, 100, 3, (0, 0, 1)))


def test_layers_behind_the_last_probe_do_not_run() -> None:
    model, images = plain_network(), smooth_images(4)
    calls = []
    model[10].register_forward_hook(lambda *_: calls.append(1))
    site = survey(plain_network(), images[:1]).sites[1]
    probe = Probe(site, *folded(model, site, torch.float32))
    responses_of(model, probe, images, 10)
    assert calls == []


def test_rows_are_those_of_cat_however_many_come() -> None:
    generator = torch.Generator().manual_seed(0)
    for expected, sizes, dtype in ((10, (4, 3, 9), torch.float32), (5, (5,), torch.float64), (2, (1,), torch.float32)):
        pieces = [torch.randn(size, 6, generator=generator, dtype=dtype) for size in sizes]
        rows = Rows(expected, 6, dtype)
        for piece in pieces:
            rows.add(piece)
        assert torch.equal(rows.all(), torch.cat(pieces))
