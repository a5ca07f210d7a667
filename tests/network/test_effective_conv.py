"""Layers of other classes or with a computed weight: taken for the one convolution they are, or left alone."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable

import pytest
import timm.layers
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import leanconv
from leanconv.network import reasons
from leanconv.network.effective_conv import plain_form
from leanconv.network.layers.kinds import geometry_of
from leanconv.network.survey import survey
from tests.support.equality import relative
from tests.support.networks import full_ranks, settle_batch_norms
from tests.support.pictures import smooth_images


class PadsOneSide(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (0, 1, 2, 1)), self.weight, self.bias, self.stride)


class PadsToEven(nn.Conv2d):
    """Padding by the size, but not 'same'."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2)))


class Scales(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Twice(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x.flip(2))


class Noisy(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight + 0.1 * torch.randn_like(self.weight), self.bias)


class Clamps(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-4, 4))


class PadsToSquare(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        side = max(x.shape[2:])
        return super().forward(F.pad(x, (0, side - x.shape[3], 0, side - x.shape[2])))


class CentresBatches(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if len(x) < 8 else x - x.mean(0))


class OnlySomeFilters(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = torch.cat([self.weight[:6], self.weight[:6]])
        return F.conv2d(x, F.pad(weight, [1, 1, 1, 1]), self.bias)


class Strings(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * 2, self.bias, padding="same", dilation=self.dilation)


class Halves(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / 2, self.bias)


def old(norm: Callable[[nn.Module], nn.Module], layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch prefers its newer ones
        return norm(layer)


def patched() -> nn.Module:
    """torch's own class, with the method that pads exchanged on the instance."""
    layer = nn.Conv2d(8, 12, 3, padding=1)

    def wraps(self: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 1, 0, 0), mode="circular"), weight, bias, self.stride, (1, 0))

    layer._conv_forward = types.MethodType(wraps, layer)
    return layer


ONE_CONVOLUTION: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: parametrizations.weight_norm(nn.Conv2d(8, 12, 3, padding=1, padding_mode="reflect")),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Conv2d(8, 12, 3, stride=2)),
    "older weight norm": lambda: old(nn.utils.weight_norm, nn.Conv2d(8, 12, 3)),
    "older spectral norm": lambda: old(nn.utils.spectral_norm, nn.Conv2d(8, 12, 3)),
    "standardised": lambda: timm.layers.StdConv2d(8, 12, 3, stride=2, padding=1),
    "same, strided": lambda: timm.layers.Conv2dSame(8, 12, 3, stride=2),
    "same, unequal strides": lambda: timm.layers.Conv2dSame(8, 12, (3, 2), stride=(3, 1)),
    "same, even kernel": lambda: timm.layers.Conv2dSame(8, 12, 4),
    "same, groups": lambda: timm.layers.Conv2dSame(8, 12, 3, stride=2, groups=2),
    "standardised, same": lambda: timm.layers.ScaledStdConv2dSame(8, 12, 3, stride=2),
    "padded on one side": lambda: PadsOneSide(8, 12, 3),
    "padded by name": lambda: Strings(8, 12, (4, 3), dilation=2),
}
SOMETHING_ELSE: dict[str, Callable[[], nn.Module]] = {
    "scales": lambda: Scales(8, 12, 3),
    "twice": lambda: Twice(8, 12, 3),
    "noisy": lambda: Noisy(8, 12, 3),
    "pads to even": lambda: PadsToEven(8, 12, 3),
    "clamps": lambda: Clamps(8, 12, 3),
    "pads to square": lambda: PadsToSquare(8, 12, 3),
    "centres batches": lambda: CentresBatches(8, 12, 3),
    "another shape": lambda: OnlySomeFilters(8, 12, 3),
    "patched": patched,
}


def network_with(layer: nn.Module) -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), layer, nn.BatchNorm2d(12), nn.ReLU(inplace=True))
    return settle_batch_norms(net)


@pytest.mark.parametrize("scheme", ["channel", "3d"])
@pytest.mark.parametrize("case", ONE_CONVOLUTION)
def test_exact_at_full_rank_on_every_size(case: str, scheme: str) -> None:
    torch.manual_seed(0)
    net, images = network_with(ONE_CONVOLUTION[case]()), smooth_images(16)
    ranks = full_ranks(net, images, scheme, ["2"])
    result = leanconv.accelerate(net, images, ranks=ranks, scheme=scheme, progress=False, samples=3000)
    for height, width in ((16, 16), (17, 16), (18, 19), (19, 17)):
        fresh = torch.randn(4, 3, height, width)
        assert relative(result.model(fresh), net(fresh)) <= 1e-5
    assert survey(result.model, images[:1]).macs == result.macs_after
    assert not any(hasattr(module, "parametrizations") for module in result.model.modules())


@pytest.mark.parametrize("case", SOMETHING_ELSE)
def test_anything_else_is_left_alone(case: str) -> None:
    torch.manual_seed(0)
    assert survey(network_with(SOMETHING_ELSE[case]()), smooth_images(2)).skipped == {"2": reasons.CUSTOM}


def test_a_linear_layer_with_a_computed_weight() -> None:
    torch.manual_seed(0)
    layer = Halves(12, 10)
    found = plain_form(layer, ())
    assert found is not None
    assert found.geometry == geometry_of(layer)
    assert torch.equal(found.weight, layer.weight / 2)


def test_saved_and_loaded(tmp_path) -> None:
    """The factors stand in the place of timm's layer; the loaded copy is built from the user's class."""
    torch.manual_seed(0)
    net = network_with(timm.layers.ScaledStdConv2dSame(8, 12, 3, stride=2))
    result = leanconv.accelerate(net, smooth_images(16), 1.5, scheme="3d", progress=False, samples=2000)
    result.save(tmp_path / "net")
    again = leanconv.load(tmp_path / "net", model=network_with(timm.layers.ScaledStdConv2dSame(8, 12, 3, stride=2)))
    fresh = smooth_images(4, seed=2)
    assert torch.equal(again(fresh), result.model(fresh))


def test_norm_with_an_activation_of_its_own() -> None:
    """timm's BatchNormAct2d: the norm is folded, the activation stays and is fitted through."""
    torch.manual_seed(0)
    norm = timm.layers.BatchNormAct2d(12, act_layer=nn.SiLU)
    net = settle_batch_norms(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3), norm))
    images = smooth_images(16)
    (site,) = [site for site in survey(net, images).sites if site.name == "2"]
    assert (site.batch_norm, site.activation.name) == ("3", "silu")
    result = leanconv.accelerate(net, images, ranks={"2": 12}, scheme="channel", progress=False, samples=3000)
    assert relative(result.model(images), net(images)) <= 1e-5
    assert not any(isinstance(module, nn.BatchNorm2d) for module in result.model.modules())


def test_attributes_that_surgery_left_behind() -> None:
    """Half the filters cut off, a stride given as a number: what the layer does is what counts."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.ReLU())
    net[2].weight, net[2].bias = nn.Parameter(net[2].weight[:8].detach()), nn.Parameter(net[2].bias[:8].detach())
    net[2].stride = 2
    images = smooth_images(16)
    result = leanconv.accelerate(net, images, ranks={"2": 8}, scheme="channel", progress=False, samples=2000)
    assert relative(result.model(images), net(images)) <= 1e-5


def test_layers_that_rearrange_their_input_do_not_stop_the_rest() -> None:
    class Flattens(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(1))

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), Flattens(8 * 12 * 12, 5)).eval()
    result = leanconv.accelerate(net, smooth_images(8), 1.3, progress=False, samples=500)
    assert [layer.name for layer in result.layers] == ["2"]


@pytest.mark.parametrize("frozen", [False, True])
def test_factors_can_be_trained_where_the_layer_could(frozen: bool) -> None:
    torch.manual_seed(0)
    net = network_with(old(nn.utils.weight_norm, nn.Conv2d(8, 12, 3))).requires_grad_(not frozen)
    result = leanconv.accelerate(net, smooth_images(8), ranks={"2": 6}, scheme="channel", progress=False, samples=500)
    assert all(parameter.requires_grad is not frozen for parameter in result.model[2].parameters())
    assert not any(module.training for module in result.model.modules())


def test_a_network_may_ask_for_shape_dtype_and_device_of_a_weight() -> None:
    """Whoever computes with the weight of a replaced layer gets NaN, and the trial run shows it."""

    class Asks(nn.Module):
        def __init__(self, use: bool) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
            self.use = use

        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.a(x)).to(self.b.weight.dtype)
            return self.b(y) * self.b.weight.shape[0] + (self.b.weight.mean() if self.use else 0)

    torch.manual_seed(0)
    images = smooth_images(8)
    net = Asks(use=False).eval()
    result = leanconv.accelerate(net, images, ranks={"b": 8}, scheme="channel", progress=False, samples=1000)
    assert relative(result.model(images), net(images)) <= 1e-5
    assert bool(result.model.b.weight.isnan().all())
    with pytest.raises(leanconv.LeanconvError, match=reasons.NOT_AT_PATH):
        leanconv.accelerate(Asks(use=True).eval(), images, ranks={"b": 8}, scheme="channel", progress=False)
