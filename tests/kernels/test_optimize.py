"""A network whose layers are fused: what is put in place, what stays, and what is refused; it answers the same."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import leanconv
from leanconv.errors import LeanconvError
from leanconv.kernels import availability, optimize_
from leanconv.kernels.modules import Absorbed, FusedConv2d, FusedFactored
from leanconv.network.layers.modules import Factored
from tests.support.fused import fused_layers, pair, row
from tests.support.networks import plain_network, settle_batch_norms
from tests.support.pictures import smooth_images


@pytest.mark.parametrize("scheme", ["channel", "spatial", "3d"])
def test_an_optimised_network_answers_the_same(scheme: str) -> None:
    images = smooth_images()
    result = leanconv.accelerate(plain_network(), images, 2.0, scheme=scheme, progress=False, samples=1000)  # type: ignore[arg-type]
    before, state = result.model(images), result.model.state_dict()
    model = optimize_(result.model)
    assert model is result.model
    assert [(one.activation, one.pooled) for one in fused_layers(model)] == [("relu", n == 0) for n in range(3)]
    assert torch.equal(model(images), before)
    assert list(model.state_dict()) == list(state)
    assert torch.equal(optimize_(model)(images), before)
    assert torch.equal(copy.deepcopy(model)(images), before)
    assert "then=relu, 2 x 2 pooling" in str(model)


def test_a_saved_result_is_that_of_the_plain_network(tmp_path: Path) -> None:
    network, images = leanconv.models.character_cnn(), torch.rand(16, 1, 24, 24)
    result = leanconv.accelerate(network, images, 2, solver="linear", samples=500, progress=False)
    before = result.model(images)
    optimize_(result.model)
    loaded = leanconv.load(result.save(tmp_path / "saved"))
    assert not any(isinstance(module, FusedFactored) for module in loaded.modules())
    assert torch.equal(loaded(images), before)


@pytest.mark.parametrize(
    "activation", [nn.ReLU(), nn.ReLU6(), nn.SiLU(), nn.GELU(), nn.Hardswish()], ids=lambda m: type(m).__name__
)
def test_every_activation_the_kernels_know_is_found(activation: nn.Module) -> None:
    model, x = row(nn.Identity(), activation), torch.randn(2, 16, 8, 8)
    wanted = model(x)
    optimize_(model)
    assert [type(module) for module in model] == [FusedFactored, nn.Identity, Absorbed]
    assert torch.equal(model(x), wanted)


@pytest.mark.parametrize(
    "following",
    [
        (nn.Tanh(), nn.MaxPool2d(2)),
        (nn.GELU(approximate="tanh"),),
        (nn.BatchNorm2d(24), nn.ReLU()),
        (nn.Dropout(), nn.ReLU()),
        (nn.MaxPool2d(2), nn.ReLU()),
        (),
    ],
)
def test_what_the_kernels_do_not_know_stays(following: tuple[nn.Module, ...]) -> None:
    model, x = row(*following), torch.randn(2, 16, 8, 8)
    wanted = model(x)
    optimize_(model)
    assert [type(module) for module in model][1:] == [type(module) for module in following]
    assert [one.activation for one in fused_layers(model)] == ["none"]
    assert torch.equal(model(x), wanted)


@pytest.mark.parametrize(
    "pooling", [nn.MaxPool2d(3), nn.MaxPool2d(2, 1), nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(2, padding=1)]
)
def test_other_poolings_stay(pooling: nn.Module) -> None:
    model, x = row(nn.ReLU(), pooling), torch.randn(2, 16, 9, 9)
    wanted = model(x)
    optimize_(model)
    assert type(model[2]) is nn.MaxPool2d
    assert torch.equal(model(x), wanted)


def test_hooks_and_shared_layers_keep_what_follows_them() -> None:
    x = torch.randn(2, 16, 8, 8)
    hooked = row(nn.ReLU())
    hooked[1].register_forward_hook(lambda module, given, answer: answer + 1)
    one = pair(16, 5, 16)
    shared = nn.Sequential(nn.Sequential(one, nn.ReLU()), nn.Sequential(one, nn.Tanh())).eval()
    for model in (hooked, shared):
        wanted = model(x)
        assert [layer.activation for layer in fused_layers(optimize_(model))] == ["none"]
        assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_residual_blocks_add_and_activate_in_the_last_launch(name: str) -> None:
    import torchvision

    torch.manual_seed(0)
    network = settle_batch_norms(getattr(torchvision.models, name)())
    x = torch.randn(2, 3, 64, 64)
    for block in network.layer2:
        assert isinstance(block.conv2, nn.Conv2d)
        c, d, stride = block.conv2.in_channels, block.conv2.out_channels, block.conv2.stride
        reduce = nn.Conv2d(c, 6, 3, stride, padding=1, bias=False)
        block.conv2 = Factored([("reduce", reduce), ("expand", nn.Conv2d(6, d, 1))], (d, c, 3, 3))
        block.bn2 = nn.Identity()
    network.eval()
    with torch.no_grad():
        wanted = network(x)
        optimize_(network)
        assert torch.allclose(network(x), wanted, rtol=1e-5, atol=1e-5)
    found = fused_layers(network)
    assert {one.name.split(".")[0] for one in found} == {"layer2"}
    assert all(one.activation == "relu" and one.addend == (name == "resnet18") for one in found)
    assert type(network.layer1[0]).__name__ in ("BasicBlock", "Bottleneck")


def test_a_first_convolution_of_few_channels_is_fused_too() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), pair(), nn.ReLU(), nn.Conv2d(24, 8, 3), nn.ReLU()]
    model, x = nn.Sequential(*layers).eval(), torch.randn(2, 3, 8, 8)
    wanted, keys = model(x), list(model.state_dict())
    optimize_(model)
    kinds = [FusedConv2d, Absorbed, FusedFactored, Absorbed, nn.Conv2d, nn.ReLU]
    assert [type(module) for module in model] == kinds
    assert torch.equal(model(x), wanted)
    assert list(model.state_dict()) == keys


def test_a_fused_layer_adds_before_its_activation() -> None:
    layer = optimize_(row(nn.ReLU()))[0]
    x, addend = torch.randn(2, 16, 8, 8), torch.randn(2, 24, 8, 8)
    assert torch.equal(layer(x, addend), F.relu(layer.unfused(x) + addend))


def test_an_optimised_network_can_be_trained() -> None:
    model = optimize_(row(nn.ReLU()).requires_grad_(True).train())
    model(torch.randn(2, 16, 8, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# Refusals.


def test_what_cannot_be_optimised_is_refused_in_a_sentence() -> None:
    with pytest.raises(LeanconvError, match=r"model is a str; give a network"):
        optimize_("vgg16")  # type: ignore[type-var]
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    with pytest.raises(LeanconvError, match=r"Sequential has no factorised layer .* leanconv\.accelerate"):
        optimize_(plain)
    assert type(plain[0]) is nn.Conv2d
    grouped = Factored([("reduce", nn.Conv2d(8, 4, 3, groups=2, bias=False)), ("expand", nn.Conv2d(4, 8, 1))], ())
    linear = Factored([("reduce", nn.Linear(8, 2, bias=False)), ("expand", nn.Linear(2, 8))], ())
    with pytest.raises(LeanconvError, match=r"\(0: it has groups, 1: it is not made of two-dimensional conv"):
        optimize_(nn.Sequential(grouped, linear))


def test_a_gpu_that_cannot_run_them_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert availability.missing(torch.device("cpu")) == (
        "leanconv's kernels run on an NVIDIA GPU, and the network is on cpu; move it there first."
    )
    assert not availability.available(torch.device("cpu"))
    old = {"get_device_capability": lambda number: (7, 5), "get_device_name": lambda number: "Tesla T4"}
    for name, answer in old.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "Tesla T4 has 7.5" in str(availability._missing_on.__wrapped__(0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert str(availability._missing_on.__wrapped__(0)).endswith("pip install 'leanconv[kernels]'.")


def test_kernels_of_accelerate() -> None:
    network, images = leanconv.models.character_cnn(), torch.rand(8, 1, 24, 24)
    with (
        pytest.warns(FutureWarning),
        pytest.raises(LeanconvError, match=r"kernels='yes' is not known; use 'auto', 'none'\."),
    ):
        leanconv.accelerate(network, [], 2, kernels="yes")
    with pytest.warns(FutureWarning, match=r"kernels= is going; write leanconv\.optimize_\(result\.model\) instead"):
        result = leanconv.accelerate(network, images, 2, solver="linear", samples=500, progress=False, kernels="auto")
    # On the CPU there is nothing to put in place.
    assert fused_layers(result.model) == []
