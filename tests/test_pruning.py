"""scheme="3c": which channels can go, what they cost, and a result that is one of the original network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leanconv
from leanconv import LeanconvError
from leanconv.calibrate.batches import take
from leanconv.calibrate.patches import Positions
from leanconv.inspection import inspect_network
from leanconv.network.prunable import prunable
from leanconv.network.replaceable import replaceable
from leanconv.network.survey import survey
from leanconv.network.trial import Trial
from leanconv.pruning import Pruned, Pruning
from leanconv.report.facts import facts_of
from leanconv.report.page import page
from leanconv.solve.moments import Gathering, Moments
from leanconv.storage import load_result
from leanconv.three_c import _surely
from leanconv.train.goals import Distillation

CPU = torch.device("cpu")


def chain(*between: nn.Module, width: int = 12) -> nn.Sequential:
    """Three convolutions; ``between`` the first two stands what is given, or a ReLU."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        *(between or (nn.ReLU(),)),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 5),
    ).eval()


class Block(nn.Module):
    """A bottleneck between two convolutions, with a batch norm behind each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.a, self.b, self.c = nn.Conv2d(8, 6, 1), nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 8, 1)
        self.na, self.nb, self.nc = nn.BatchNorm2d(6), nn.BatchNorm2d(6), nn.BatchNorm2d(8)
        self.last = nn.Conv2d(8, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        y = self.nc(self.c(self.nb(self.b(self.na(self.a(x)).relu())).relu()))
        out: Tensor = self.last((x + y).relu()).mean((2, 3))
        return out


class Twice(nn.Module):
    """Two layers look at the first one's maps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.other = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3), nn.Conv2d(6, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return torch.cat([self.second(x).relu(), self.other(x).relu()], 1).mean((2, 3))


class By(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def found(network: nn.Module, images: Tensor) -> tuple[Trial, list[Any], Any]:
    seen = survey(network, images)
    trial = Trial(network, images)
    return trial, replaceable(trial, list(seen.sites)), seen


@pytest.mark.parametrize(
    ("network", "wanted"),
    [
        (chain(), [("0", "2"), ("2", "4")]),
        (chain(nn.BatchNorm2d(12), nn.ReLU()), [("0", "3"), ("3", "5")]),
        (chain(nn.LeakyReLU(0.1), nn.MaxPool2d(2), nn.Dropout(0.5)), [("0", "4"), ("4", "6")]),
        (chain(nn.PReLU(12)), [("2", "4")]),  # it has a number a channel
        (chain(By(lambda x: x.flip(1).relu())), [("2", "4")]),
        (chain(nn.GroupNorm(4, 12), nn.ReLU()), [("3", "5")]),  # channels are normalised together
        (chain(By(lambda x: x.relu() * x[:, :1].sigmoid())), [("2", "4")]),  # a channel is known by its number
        (chain(By(lambda x: x.relu() * x[:, -1:].sigmoid())), [("2", "4")]),
        (chain(By(lambda x: x.relu() / x.amax(1, keepdim=True))), [("2", "4")]),
        (chain(width=1), []),
        (Block().eval(), [("a", "b"), ("b", "c")]),  # stem's maps go on beside the block, and c's are added to them
        (Twice().eval(), []),
    ],
)
def test_filters_can_go_where_one_convolution_alone_looks_at_them(
    network: nn.Module, wanted: list[tuple[str, str]]
) -> None:
    trial, sites, _ = found(network, torch.randn(2, 3, 12, 12))
    assert [(pair.giver.name, pair.taker.name) for pair in prunable(trial, sites)] == wanted


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


def test_images_that_judge_have_no_say_before(images: Tensor) -> None:
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


@pytest.fixture(scope="module")
def images() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(256, 3, 12, 12)


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
