"""Bad arguments, images and models: one clear sentence each, and no false alarm."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from leanconv import LeanconvError
from tests.support.networks import plain_network
from tests.support.runs import accelerate

REFUSALS = [
    ({"speedup": 1.0}, r"speedup=1.0 must be a number above 1"),
    ({"speedup": -2}, r"speedup=-2 must"),
    ({"speedup": float("nan")}, r"speedup=nan must"),
    ({"speedup": "4"}, r"speedup='4' must"),
    ({"speedup": 1e6}, r"speedup=1e\+06 cannot be reached: .* gets \d+\.\d\dx"),
    ({"scheme": "4d"}, r"scheme='4d' is not known; use 'channel', 'spatial', '3d'"),
    ({"solver": "quadratic"}, r"solver='quadratic'"),
    ({"ranks": "random"}, r"ranks='random' is not known"),
    ({"latency": 20}, r"goes with ranks='latency' only"),
    ({"ranks": "latency", "latency": -1}, r"milliseconds above 0"),
    ({"ranks": {"3": (4, 400)}}, r"allows 1 to 24"),
    ({"ranks": {"33": (4, 4)}}, r"ranks names the layer '33'.*did you mean 3"),
    ({"skip": ["00"]}, r"skip names the layer '00'.*did you mean 0"),
    ({"skip": "0"}, r"one string"),
    ({"skip": ["0", "3", "7", "10"]}, r"no layer is left"),
    ({"layers": "dense"}, r"layers='dense'"),
    ({"samples": 0}, r"samples=0"),
    ({"seed": -1}, r"seed=-1"),
    ({"seed": 2**64}, r"seed=18446744073709551616 must be a whole number"),
    ({"skip": 5}, r"must be a list of layer names"),
    ({"ranks": {3: (4, 4)}}, r"give layer names as strings"),
    ({"device": "toaster"}, r"device='toaster' cannot be used"),
    ({"workdir": "pyproject.toml"}, r"cannot write to workdir='pyproject.toml'"),
    ({"workdir": "src"}, r"holds other files"),
    ({"memory": "lots"}, r"memory='lots' is no amount of memory"),
    ({"memory": 0}, r"memory=0"),
]


@pytest.mark.filterwarnings("ignore:latency= is going")
@pytest.mark.parametrize(("arguments", "message"), REFUSALS, ids=[str(a) for a, _ in REFUSALS])
def test_bad_arguments_get_one_sentence(arguments, message: str, network: nn.Module, pictures: Tensor) -> None:
    with pytest.raises(LeanconvError, match=message) as caught:
        accelerate(network, pictures, **arguments)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], "images is empty"),
        (None, "NoneType, which cannot be iterated"),
        (["a.jpg"], "images gave a str"),
        ("photos/", "images is the path 'photos/'"),
        ([torch.zeros(3)], "every item must be a batch"),
        (torch.zeros(4, 1, 16, 16), "layer '0' takes 3 input channels but was given 1"),
        ([torch.zeros(4, 3, 1, 1)], "the model raised"),
    ],
)
def test_bad_images(images, message: str, network: nn.Module) -> None:
    with pytest.raises(LeanconvError, match=message):
        accelerate(network, images)


def test_nan_names_the_layer(network: nn.Module, pictures: Tensor) -> None:
    spoilt = copy.deepcopy(network)
    with torch.no_grad():
        spoilt[7].weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(LeanconvError, match="layer '7' has NaN or infinite values in its weight"):
        accelerate(spoilt, pictures)
    bad = pictures.clone()
    bad[3, 0, 0, 0] = float("inf")
    with pytest.raises(LeanconvError, match="layer '3' receives NaN"):
        accelerate(network, bad)

    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.log()

    late = copy.deepcopy(network)
    late[6] = Log()
    with pytest.raises(LeanconvError, match="layer '7' receives NaN"):
        accelerate(late, pictures)


def test_wrapped_and_wrong_models(pictures: Tensor, network: nn.Module) -> None:
    for model, message in [
        ("vgg16", "model is a str"),
        (nn.DataParallel(plain_network()), "model.module"),  # it moves a network to the GPU
        (torch.jit.trace(network, pictures[:1]), "TorchScript"),
        (nn.Sequential(nn.Flatten(), nn.Linear(768, 4)), "no convolution"),
        (nn.Sequential(nn.LazyConv2d(4, 3)), "lazy"),
        (plain_network().to("meta"), "meta device"),
    ]:
        with pytest.raises(LeanconvError, match=message):
            accelerate(model, pictures)  # type: ignore[arg-type]


def test_an_infinite_mask_is_not_a_broken_weight(network: nn.Module, pictures: Tensor) -> None:
    network.register_buffer("mask", torch.full((2, 2), float("-inf")))
    assert accelerate(network, pictures).speedup >= 2.0
