"""What channels cost that go, in which order they go, and the network without them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import take
from leanconv.calibrate.patches import Positions
from leanconv.network.prunable import prunable
from leanconv.network.survey import survey
from leanconv.pruning import Pruned, Pruning
from leanconv.solve.moments import Gathering, Moments
from tests.test_prunable import Block, chain, found

CPU = torch.device("cpu")


def pictures() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(256, 3, 12, 12)


def pruning_of(network: nn.Module, images: Tensor) -> Pruning:
    trial, sites, seen = found(network, images[:2])
    pruning = Pruning(network, trial.filters, prunable(trial, sites), seen, torch.float32)
    positions = Positions(per_image=50, images=len(images), seed=0, device=CPU)
    pruning.measure(take([images]), positions, CPU, lambda: None)
    pruning.choose(lambda: None)
    return pruning


def with_spare_filters() -> nn.Sequential:
    """Half of its filters say what the others do."""
    network = chain()
    with torch.no_grad():
        for number in (0, 2):
            layer = network[number]
            layer.weight[6:], layer.bias[6:] = 2 * layer.weight[:6], 2 * layer.bias[:6]
        network[-1].weight *= 30  # answers that are not all alike
    return network


def test_what_others_say_goes_for_nothing() -> None:
    network, images = with_spare_filters(), torch.randn(40, 3, 10, 10)
    pruning = pruning_of(network, images)
    pruned = pruning.pruned({"0": 6, "2": 6})
    assert [pruned.model[number].out_channels for number in (0, 2, 4)] == [6, 6, 8]
    for stay in pruned.kept.values():
        assert sorted(stay % 6) == [0, 1, 2, 3, 4, 5]  # one of each two
    torch.testing.assert_close(pruned.model(images), network(images), rtol=1e-3, atol=1e-3)
    pruned = pruning.pruned(pruning.keeps(100))  # as far as it goes
    assert not torch.allclose(pruned.model(images), network(images), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("network", [chain(), chain(nn.BatchNorm2d(12), nn.ReLU()), Block().eval()])
def test_a_refit_is_better_than_leaving_channels_out(network: nn.Module) -> None:
    images = torch.randn(48, 3, 12, 12)
    pruning = pruning_of(network, images[:40])
    keeps = pruning.keeps(1.3)
    pruned = pruning.pruned(keeps)
    assert pruned.macs == pytest.approx(survey(pruned.model, images[:1]).macs, rel=1e-6)
    assert 1.3 <= pruning.survey.macs / pruned.macs < 1.6
    plain = pruning.pruned(keeps)
    for pair in pruning.pairs:
        if pair.giver.name in plain.kept:
            weight, bias = pruning.filters.of(pair.taker, torch.float32)
            mine = plain.kept.get(pair.taker.name, torch.arange(len(bias)))
            layer = plain.model.get_submodule(pair.taker.name)
            layer.weight.data, layer.bias.data = weight[mine][:, plain.kept[pair.giver.name]], bias[mine]
    with torch.no_grad():
        errors = [float((model(images[40:]) - network(images[40:])).norm()) for model in (pruned.model, plain.model)]
    assert errors[0] < errors[1]


def test_filters_are_kept_where_they_are_missed_most() -> None:
    network, images = with_spare_filters(), torch.randn(40, 3, 10, 10)
    with torch.no_grad():
        network[2].weight[6:] = chain(width=12)[2].weight[6:]  # the second convolution needs all of its own
    pruning = pruning_of(network, images)
    assert pruning.keeps(1.2)["2"] == 12
    assert pruning.keeps(1.2)["0"] < 12


def test_moments_of_pieces_are_those_of_the_whole() -> None:
    torch.manual_seed(0)
    rows = torch.randn(300, 7) * torch.arange(1, 8) + 1000
    gathering = Gathering()
    assert gathering.moments is None
    for piece in rows.split([1, 99, 0, 200]):
        gathering.add(piece)
    found, whole = gathering.moments, Moments.of(rows)
    assert found is not None
    assert found.count == 300
    torch.testing.assert_close(found.mean, whole.mean)
    torch.testing.assert_close(found.scatter, whole.scatter, rtol=1e-9, atol=1e-6)


def test_a_bias_makes_up_for_what_channels_always_say() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU(), nn.Flatten()).eval()
    with torch.no_grad():
        network[0].weight[2:4] *= 1e-3
        network[0].bias[2:4] = 5.0  # two filters that hardly move, and matter all the same
    images = torch.randn(64, 3, 10, 10)
    pruned = pruning_of(network, images).pruned({"0": 4})
    assert pruned.kept["0"].tolist() == [0, 1, 4, 5]
    torch.testing.assert_close(pruned.model(images), network(images), rtol=1e-2, atol=1e-2)
    assert pruned.lost["2"] < 1e-3


def test_images_that_judge_have_no_say_before() -> None:
    images = pictures()
    other = images.clone()
    other[7::8] *= torch.tensor([5.0, 0.1, -1.0])[:, None, None]
    one, two = pruning_of(chain(), images), pruning_of(chain(), other)
    alike = [
        torch.equal(a, b) for a, b in zip(*(_all(each.pruned(each.keeps(1.3))) for each in (one, two)), strict=True)
    ]
    assert all(alike)
    for each in (one, two):
        each.choose(lambda: None, everything=True)
    alike = [
        torch.equal(a, b) for a, b in zip(*(_all(each.pruned(one.keeps(1.3))) for each in (one, two)), strict=True)
    ]
    assert not all(alike)


def _all(pruned: Pruned) -> list[Tensor]:
    return list(pruned.model.state_dict().values())
