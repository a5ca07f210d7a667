"""scheme="3c": how much is pruned is found out, and the result is one of the original network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leanconv
from leanconv import LeanconvError
from leanconv.inspection import inspect_network
from leanconv.network.survey import survey
from leanconv.pruning import Pruned, Pruning
from leanconv.report.facts import facts_of
from leanconv.report.page import page
from leanconv.storage import load_result
from leanconv.three_c import _surely
from leanconv.train.goals import Distillation
from tests.test_prunable import By, Twice, chain
from tests.test_pruning import pictures, with_spare_filters


@pytest.fixture(scope="module")
def images() -> Tensor:
    return pictures()


@pytest.fixture(scope="module")
def result(images: Tensor) -> leanconv.Accelerated:
    return accelerated(with_spare_filters(), images)


def accelerated(network: nn.Module, images: Tensor, **arguments: Any) -> leanconv.Accelerated:
    return leanconv.accelerate(
        network, images, **{"speedup": 2.5, "scheme": "3c", "samples": 2000, "progress": False, **arguments}
    )


def change(network: nn.Module, images: Tensor) -> float:
    with torch.no_grad():
        wanted = with_spare_filters()(images)
        return float((network(images) - wanted).norm() / wanted.norm())


def test_spare_filters_are_pruned_and_the_rest_is_nearer_to_the_original(
    result: leanconv.Accelerated, images: Tensor
) -> None:
    fresh = torch.randn(64, 3, 12, 12)
    plain = accelerated(with_spare_filters(), images, scheme="3d")
    assert result.pruning is not None
    assert result.pruning["factor"] > 1.1
    assert 2.5 <= result.speedup < 2.55
    assert change(result.model, fresh) < 0.9 * change(plain.model, fresh)
    tried = dict(result.pruning["tried"])
    assert tried[result.pruning["factor"]] < tried[1.0]
    assert "channels pruned: " in str(result)


def test_the_result_is_one_of_the_original(result: leanconv.Accelerated, images: Tensor, tmp_path: Path) -> None:
    network = with_spare_filters()
    assert result.macs_before == survey(network, images[:1]).macs
    assert result.macs_after == inspect_network(result.model, None, shape=(1, 3, 12, 12), device="cpu").survey.macs
    assert result.parameters_before == sum(parameter.numel() for parameter in network.parameters())
    macs = {layer.name: layer.macs for layer in survey(network, images[:1]).layers}
    assert all(layer.macs_before == macs[layer.name] for layer in result.layers)
    named = {layer.name for layer in result.layers} | set(result.skipped)
    assert named == {"0", "2", "4"}
    first = next(one for one in result.changes if one.name == "0")
    assert first.scheme == "pruned"
    assert first.kept is not None
    assert len(first.kept) == first.geometry.out_channels < 12
    result.save(tmp_path / "saved")
    again = load_result(tmp_path / "saved", with_spare_filters())
    assert torch.equal(again.model(images), result.model(images))
    assert again.pruning == result.pruning
    assert again.changes == result.changes


def test_its_page_says_so(result: leanconv.Accelerated, tmp_path: Path) -> None:
    said = page(facts_of(result.save(tmp_path / "saved")))
    assert f"channels pruned by {result.pruning['factor']:.2f}x" in said  # type: ignore[index]
    assert "Ranks were chosen after channels had been pruned" in said


def test_the_same_call_gives_the_same_bits(result: leanconv.Accelerated, images: Tensor) -> None:
    network = with_spare_filters()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    again = accelerated(network, images)
    assert torch.equal(again.model(images), result.model(images))
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_maps_are_compared_in_the_channels_that_were_kept(result: leanconv.Accelerated, images: Tensor) -> None:
    original = with_spare_filters()
    kept = {one.name: torch.tensor(one.kept) for one in result.changes if one.kept is not None}

    def loss(network: nn.Module, places: list[str], kept: dict[str, Tensor]) -> float:
        with torch.no_grad():
            return float(Distillation(original, places, 0.0, kept)(network, images, None).loss.mean())

    other = {"0": (kept["0"] + 6) % 12}
    assert loss(result.model, ["0"], {"0": kept["0"]}) < 1e-6 < loss(result.model, ["0"], other)
    tuned = leanconv.finetune(result, images, original, epochs=4, batch=16, progress=False)
    places = [one.name for one in result.changes]
    assert loss(tuned.model, places, kept) < loss(result.model, places, kept)


def test_distillation_ends_the_call(images: Tensor) -> None:
    found = accelerated(with_spare_filters(), images, refine="distill")
    assert found.training is not None
    assert found.pruning is not None
    assert change(found.model, images) < 0.5


def test_a_gain_that_may_be_chance_is_none() -> None:
    torch.manual_seed(0)
    noise = torch.randn(100).double()
    noise -= noise.mean()
    assert _surely(noise + 0.2)
    assert not _surely(noise + 0.05)
    assert not _surely(noise - 0.2)


def test_layers_to_skip_lose_nothing(images: Tensor) -> None:
    found = accelerated(with_spare_filters(), images, skip=["0"], speedup=1.8)
    assert "0" in found.skipped
    assert all(one.name != "0" for one in found.changes)


def test_where_pruning_does_worse_nothing_is_pruned(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(self: Pruning, keeps: dict[str, int], plain: Callable[..., Pruned] = Pruning.pruned) -> Pruned:
        pruned = plain(self, keeps)
        with torch.no_grad():
            for layer in pruned.model:
                if isinstance(layer, nn.Conv2d):
                    layer.weight.zero_()
        return pruned

    monkeypatch.setattr(Pruning, "pruned", spoilt)
    found = accelerated(with_spare_filters(), images)
    assert found.pruning is not None
    assert found.pruning["factor"] == 1
    assert len(found.pruning["tried"]) == 3
    plain = accelerated(with_spare_filters(), images, scheme="3d")
    assert torch.equal(found.model(images), plain.model(images))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ranks": "latency"}, "ranks='latency' is about the layers there are"),
        ({"ranks": {"2": (4, 4)}}, "is about the layers there are"),
        ({"asymmetric": False}, "asymmetric=False does not go with scheme='3c'"),
        ({"part": "0"}, "part='0' does not go with scheme='3c'"),
        ({"workdir": "work"}, "scheme='3c' keeps no workdir"),
    ],
)
def test_what_does_not_go_with_it_is_refused(images: Tensor, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(LeanconvError, match=said):
        accelerated(with_spare_filters(), images, **arguments)


def test_networks_and_images_it_cannot_use_are_refused(images: Tensor) -> None:
    with pytest.raises(
        LeanconvError, match="this network has none, or only in layers to skip; use scheme='3d' instead"
    ):
        accelerated(Twice().eval(), images, skip=[])
    with pytest.raises(LeanconvError, match="judges by outputs that go image by image, and this network has none"):
        accelerated(nn.Sequential(with_spare_filters(), By(Tensor.mean)).eval(), images)
    with pytest.raises(LeanconvError, match="10 were given; give at least 64"):
        accelerated(with_spare_filters(), images[:10])


def test_maps_that_never_change_stay(images: Tensor) -> None:
    network = with_spare_filters()
    with torch.no_grad():
        network[0].weight.zero_()
        network[0].bias.fill_(-1)
    found = accelerated(network, images)  # 3d takes it, too
    assert found.pruning is not None
    assert next((one.kept for one in found.changes if one.name == "0"), None) is None


class Counting(nn.Module):
    """Changes a buffer whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = with_spare_filters()
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        out: Tensor = self.body(x)
        return out


def test_buffers_are_as_the_user_gave_them(images: Tensor) -> None:
    network = Counting().eval()
    found = accelerated(network, images)
    assert found.pruning is not None
    assert found.pruning["factor"] > 1
    assert float(network.runs) == float(found.model.runs) == 0


def test_layers_are_fitted_to_the_original_not_to_the_pruned_network(
    images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pruned network that responds twice as much as the original is put right."""

    def doubled(self: Pruning, keeps: dict[str, int], plain: Callable[..., Pruned] = Pruning.pruned) -> Pruned:
        pruned = plain(self, keeps)
        with torch.no_grad():
            pruned.model[4].weight *= 2
            pruned.model[4].bias *= 2
        return pruned

    monkeypatch.setattr(Pruning, "pruned", doubled)
    monkeypatch.setattr("leanconv.three_c._surely", lambda gains: True)  # whatever it does, the last is taken
    found = accelerated(with_spare_filters(), images, refine="none")
    assert found.pruning is not None
    assert found.pruning["factor"] > 1
    assert "4" in {layer.name for layer in found.layers if layer.scheme != "pruned"}
    assert change(found.model, images) < 0.3


def test_a_frozen_layer_stays_frozen_and_a_folded_norm_is_loaded(images: Tensor, tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        network = chain(nn.BatchNorm2d(12), nn.ReLU())
        with torch.no_grad():
            for number in (0, 3):
                layer = network[number]
                layer.weight[6:], layer.bias[6:] = 2 * layer.weight[:6], 2 * layer.bias[:6]
            network[1].running_mean.uniform_(-0.1, 0.1)
            network[-1].weight *= 30
        network[0].requires_grad_(False)
        return network.eval()

    found = accelerated(build(), images)
    assert found.pruning is not None
    assert found.pruning["factor"] > 1
    assert not any(parameter.requires_grad for parameter in found.model[0].parameters())
    assert all(parameter.requires_grad for parameter in found.model[3].parameters())
    assert sum(layer.macs_before for layer in found.layers) <= found.macs_before
    found.save(tmp_path / "saved")
    again = load_result(tmp_path / "saved", build())
    assert torch.equal(again.model(images), found.model(images))
