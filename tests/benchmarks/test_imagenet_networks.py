"""Networks with weights of package registries: their own architecture, on pictures normalised as usual."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from torch.nn import functional as F

from benchmarks.common.imagenet_networks import EfficientNetLite0, ResNet50, load, take_over
from benchmarks.common.initialise import initialise
from leanconv.images.preprocess import IMAGENET_MEAN, IMAGENET_STD


def test_efficientnet_lite0_is_that_of_timm() -> None:
    """Same modules in the same order, batch norms with statistics; the same answers, at borders too."""
    model, theirs = initialise(EfficientNetLite0()).eval(), timm.create_model("tf_efficientnet_lite0").eval()
    generator = torch.Generator().manual_seed(0)
    state = {key: value for key, value in model.state_dict().items() if key != "shift.by"}
    for key, value in state.items():
        if key.endswith(("running_mean", "running_var", "bn.bias")):
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
    theirs.load_state_dict(dict(zip(theirs.state_dict(), state.values(), strict=True)))
    images = torch.randn(1, 3, 64, 64, generator=generator)
    with torch.no_grad():
        expected = theirs(images)
        assert (model(images) - expected).norm() <= 1e-4 * expected.norm()
        assert model(images + 1).sub(expected).norm() > 1e-2 * expected.norm()


def test_the_first_convolution_takes_over_what_pictures_were_normalised_by() -> None:
    """Exactly, at the padded borders too, where both have zeros."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 3, 3, 3, generator=generator)
    mean, std = torch.tensor((123.0, 117.0, 104.0)), torch.tensor((1.0, 57.0, 128.0))
    picture = torch.rand(1, 3, 8, 8, generator=generator)
    as_trained = (255 * picture - mean[:, None, None]) / std[:, None, None]
    usual = (picture - torch.tensor(IMAGENET_MEAN)[:, None, None]) / torch.tensor(IMAGENET_STD)[:, None, None]
    changed, shift = take_over(weight, mean, std)
    expected = F.conv2d(as_trained, weight, padding=1)
    assert (F.conv2d(usual + shift, changed, padding=1) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_resnet50_has_its_strides_in_the_first_1x1() -> None:
    strided = {name for name, module in ResNet50().named_modules() if getattr(module, "stride", 1) == (2, 2)}
    blocks = {f"layer{layer}.0.{part}" for layer in (2, 3, 4) for part in ("conv1", "downsample.0")}
    assert strided == {"conv1"} | blocks


def test_weights_are_read_in_half_precision_and_asked_for_where_they_lack(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"resnet50\.safetensors is not there; python -m benchmarks"):
        load("resnet50", tmp_path)
    model = initialise(EfficientNetLite0())
    state = {key: value.half() for key, value in model.state_dict().items() if value.is_floating_point()}
    safetensors.torch.save_file(state, tmp_path / "efficientnet_lite0.safetensors")
    found = load("efficientnet_lite0", tmp_path)
    assert not found.training
    assert found.state_dict()["fc.weight"].equal(state["fc.weight"].float())
