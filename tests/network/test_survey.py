"""Sites found by observation, batch norm folded, MACs counted, layers replaced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leanconv.errors import LeanconvError
from leanconv.network import reasons
from leanconv.network.dry_run import Trial, replaceable
from leanconv.network.fold import folded
from leanconv.network.layers.kinds import geometry_of
from leanconv.network.survey import survey
from tests.support.networks import Odd, plain_network, settle_batch_norms
from tests.support.reasons import ALL

SAMPLE = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_plain_network() -> None:
    found = survey(plain_network(), SAMPLE)
    assert [site.name for site in found.sites] == ["0", "3", "7", "10"]
    assert [site.batch_norm for site in found.sites] == ["1", "4", "8", "11"]
    assert {site.activation.name for site in found.sites} == {"relu"}
    assert [layer.macs for layer in found.layers] == [
        16 * 16 * 16 * 27,
        16 * 16 * 24 * 16 * 9,
        8 * 8 * 32 * 24 * 9,
        8 * 8 * 32 * 32 * 9,
    ]
    assert found.skipped == {}


def test_macs_do_not_depend_on_the_batch() -> None:
    model = plain_network()
    assert survey(model, SAMPLE.expand(5, -1, -1, -1)).macs == survey(model, SAMPLE).macs


def test_linear_layers_count_when_asked() -> None:
    found = survey(plain_network(), SAMPLE, layers="all")
    assert found.layers[-1].type == "Linear"
    assert found.layers[-1].macs == 320
    assert found.sites[-1].activation.name == "identity"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (nn.ReLU, "relu"),
        (lambda: nn.ReLU(inplace=True), "relu"),
        (nn.LeakyReLU, "leaky_relu"),
        (lambda: nn.PReLU(8), "prelu"),
        (nn.ReLU6, "relu6"),
        (nn.Hardtanh, "hardtanh"),
        (nn.SiLU, "silu"),
        (nn.GELU, "gelu"),
        (lambda: nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.Hardswish, "hardswish"),
        (nn.ELU, "elu"),
        (nn.Sigmoid, "sigmoid"),
        (nn.Tanh, "tanh"),
        (nn.Mish, "mish"),
        (lambda: nn.Softplus(2.0, 30.0), "softplus"),
        (nn.Identity, "identity"),
    ],
)
def test_activation_modules(make, expected: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), make()).eval()
    assert survey(model, SAMPLE).sites[0].activation.name == expected


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (F.relu, "relu"),
        (lambda y: F.relu(y, inplace=True), "relu"),
        (torch.relu, "relu"),
        (lambda y: y.relu(), "relu"),
        (lambda y: y.relu_(), "relu"),
        (lambda y: F.leaky_relu(y, 0.2), "leaky_relu"),
        (F.silu, "silu"),
        (lambda y: F.gelu(y, approximate="tanh"), "gelu_tanh"),
        (lambda y: F.hardtanh(y, -2.0, 2.0), "hardtanh"),
        (torch.sigmoid, "sigmoid"),
        (F.mish, "mish"),
        (lambda y: F.softplus(y, beta=2), "softplus"),
        (lambda y: y.tanh(), "tanh"),
        (lambda y: y + 1, "identity"),
        (lambda y: F.relu(y) + y, "identity"),  # two consumers: what is behind one does not describe the response
    ],
)
def test_activation_calls(call, expected: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            assert y.shape[1] == 8  # asking for a shape consumes nothing
            return call(y)

    assert survey(Net().eval(), SAMPLE).sites[0].activation.name == expected


def test_activation_parameters_are_read() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LeakyReLU(0.3)).eval()
    assert survey(model, SAMPLE).sites[0].activation.parameters == {"slope": 0.3}


def test_every_reason() -> None:
    model = Odd().eval()
    found = survey(model, SAMPLE)
    named = {name.partition("#")[0]: reason for name, reason in found.skipped.items()}
    assert named == {
        "depthwise": reasons.DEPTHWISE,
        "again": reasons.USED_AGAIN,
        "up": reasons.TRANSPOSED,
        "unused": reasons.UNUSED,
        "tied": reasons.SHARED,
        "tied_too": reasons.SHARED,
        "hooked": reasons.HOOKED,
        "custom": reasons.CUSTOM,
        "conv2d": reasons.FUNCTION,
    }
    assert set(named.values()) <= set(ALL)
    macs = {layer.name.partition("#")[0]: layer.macs for layer in found.layers}
    assert macs["depthwise"] == 16 * 16 * 8 * 9
    assert macs["grouped"] == 16 * 16 * 8 * 4 * 9
    assert macs["again"] == 2 * 16 * 16 * 8 * 8 * 9
    assert macs["up"] == 16 * 16 * 8 * 8 * 4
    assert macs["conv2d"] == 30 * 30 * 8 * 8 * 9
    # 'held' also lies in a plain list, which replacing the attribute does not reach.
    assert [site.name for site in replaceable(Trial(model, SAMPLE), list(found.sites))] == ["plain", "grouped", "line"]


def test_a_layer_whose_attributes_are_read_cannot_be_replaced() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) * self.b.out_channels

    model = Reads().eval()
    before = dict(model.named_modules())
    sites = list(survey(model, SAMPLE).sites)
    assert [site.name for site in replaceable(Trial(model, SAMPLE), sites)] == ["a"]
    assert dict(model.named_modules()) == before


def test_batch_norm_is_folded_exactly() -> None:
    model = settle_batch_norms(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)))
    (site,) = survey(model, SAMPLE).sites
    weight, bias = folded(model, site, torch.float64)
    assert torch.allclose(F.conv2d(SAMPLE.double(), weight, bias).float(), model(SAMPLE), atol=1e-5)


def test_batch_norm_used_twice_is_not_folded() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.b(self.norm(self.a(x))))

    assert [site.batch_norm for site in survey(Twice().eval(), SAMPLE).sites] == [None, None]


def test_wrong_channels_name_the_layer() -> None:
    with pytest.raises(LeanconvError, match=r"layer '0' takes 3 input channels but was given 1"):
        survey(plain_network(), SAMPLE[:, :1])


def test_observation_leaves_no_hooks() -> None:
    model = plain_network()
    with pytest.raises(LeanconvError):
        survey(model, SAMPLE[:, :1])
    survey(model, SAMPLE)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_single_layer_is_refused() -> None:
    with pytest.raises(LeanconvError, match="Sequential"):
        survey(nn.Conv2d(3, 8, 3), SAMPLE)


@pytest.mark.parametrize("kernel", [(3, 3), (4, 4), (2, 5)])
@pytest.mark.parametrize("dilation", [1, 2])
def test_same_padding_margins(kernel: tuple[int, int], dilation: int) -> None:
    conv = nn.Conv2d(3, 4, kernel, padding="same", dilation=dilation)
    plain = nn.Conv2d(3, 4, kernel, dilation=dilation)
    plain.load_state_dict(conv.state_dict())
    (top, left), (bottom, right) = geometry_of(conv).margins((9, 9))
    padded = F.pad(SAMPLE, (left, right, top, bottom))
    assert torch.allclose(conv(SAMPLE), plain(padded), atol=1e-6)


def test_layers_called_by_keyword() -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.act = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(input=self.act(input=self.a(input=x)))

    found = survey(ByName().eval(), SAMPLE)
    assert [layer.macs for layer in found.layers] == [14 * 14 * 8 * 27, 12 * 12 * 8 * 72]
    assert found.sites[0].activation.name == "relu"
