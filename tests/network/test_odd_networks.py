"""Networks that do unusual things with their modules: at full rank the answer is exact, or the layer is left alone."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import leanconv
from leanconv.network import reasons
from leanconv.network.dry_run import Trial
from leanconv.network.survey import survey
from tests.support.equality import relative
from tests.support.networks import full_ranks, settle_batch_norms
from tests.support.pictures import smooth_images


class Odd(nn.Module):
    """Two convolutions with batch norm and a forward of your choice."""

    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.c = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.act = nn.ReLU()
        self.norms = nn.ModuleList()
        self.hidden: list[nn.Module] = []
        self.run = forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def rest(net: Odd, y: Tensor) -> Tensor:
    return net.c(F.relu(net.b(F.relu(y))))


@torch.jit.script
def scripted(y: Tensor) -> Tensor:
    return y.tanh() * 2


def returns_raw(net: Odd, x: Tensor) -> Any:
    y = net.a(x)
    return y, rest(net, net.bn(y))


def returns_raw_in_dict(net: Odd, x: Tensor) -> Any:
    y = net.a(x)
    return {"raw": y, "out": rest(net, net.bn(y))}


def writes_raw(net: Odd, x: Tensor) -> Any:
    y = net.a(x)
    keep = torch.empty_like(y)
    keep[:] = y
    return rest(net, net.bn(y)) + keep


def numpy_of_raw(net: Odd, x: Tensor) -> Any:
    y = net.a(x)
    return rest(net, net.bn(y)) + torch.from_numpy(y.detach().numpy().copy())


def scripts_raw(net: Odd, x: Tensor) -> Any:
    y = net.a(x)
    return rest(net, net.bn(y)) + scripted(y)


def reads_norm(net: Odd, x: Tensor) -> Any:
    return rest(net, net.bn(net.a(x)) * net.bn.num_features)


def norm_at_two_paths(net: Odd, x: Tensor) -> Any:
    if not len(net.norms):
        net.norms.append(net.bn)
    return rest(net, net.norms[0](net.a(x)))


def norm_in_a_list(net: Odd, x: Tensor) -> Any:
    return rest(net, net.hidden[0](net.a(x)))


def asks_for_type(net: Odd, x: Tensor) -> Any:
    for layer in (net.a, net.bn, net.b, net.c):
        x = layer(x)
        if isinstance(layer, nn.Conv2d):
            x = x * 2
    return x


def in_place_input(net: Odd, x: Tensor) -> Any:
    return rest(net, net.bn(net.a(x.sub_(0.5).mul_(2))))


def tiles(net: Odd, x: Tensor) -> Any:
    n, c, h, w = x.shape
    x = x.reshape(n, c, 2, h // 2, 2, w // 2).permute(0, 2, 4, 1, 3, 5).reshape(4 * n, c, h // 2, w // 2)
    return rest(net, net.bn(net.a(x)))


def loops_over_the_batch(net: Odd, x: Tensor) -> Any:
    return torch.cat([rest(net, net.bn(net.a(image[None]))) for image in x])


def catches_everything(net: Odd, x: Tensor) -> Any:
    try:
        return rest(net, net.bn(net.a(x)))
    except Exception:
        return x.sum()


def drops(net: Odd, x: Tensor) -> Any:
    return rest(net, net.bn(F.dropout(net.a(x), training=False)))


def residual(net: Odd, x: Tensor) -> Any:
    y = F.relu(net.bn(net.a(x)))
    y = y + net.b(y)
    return F.relu(net.c(y) + y)


def residual_in_place(net: Odd, x: Tensor) -> Any:
    y = F.relu(net.bn(net.a(x)))
    z = net.b(y)
    z += y
    return net.c(F.relu_(z))


def sum_of_two(net: Odd, x: Tensor) -> Any:
    y = F.relu(net.bn(net.a(x)))
    return F.relu(net.b(y) + net.c(y))


def sum_of_three(net: Odd, x: Tensor) -> Any:
    y = F.relu(net.bn(net.a(x)))
    return F.relu(y + net.b(y) + net.c(F.relu(y)))


def doubles(net: Odd, x: Tensor) -> Any:
    y = net.bn(net.a(x))
    return rest(net, y + y)


def gates(net: Odd, x: Tensor) -> Any:
    y = net.bn(net.a(x))
    return net.c(y * torch.sigmoid(net.b(F.adaptive_avg_pool2d(y, 1).expand_as(y))))


def concatenates(net: Odd, x: Tensor) -> Any:
    y = F.relu(net.bn(net.a(x)))
    return net.c(torch.cat([y[:, :4], net.b(y)[:, :4]], 1))


NETWORKS = [
    returns_raw,
    returns_raw_in_dict,
    writes_raw,
    numpy_of_raw,
    scripts_raw,
    reads_norm,
    norm_at_two_paths,
    norm_in_a_list,
    asks_for_type,
    in_place_input,
    tiles,
    loops_over_the_batch,
    catches_everything,
    drops,
    residual,
    residual_in_place,
    sum_of_two,
    sum_of_three,
    doubles,
    gates,
    concatenates,
]


def build(forward: Callable[[Any, Tensor], Any]) -> Odd:
    torch.manual_seed(0)
    net = Odd(forward)
    net.hidden.append(net.bn)
    settle_batch_norms(net)
    with torch.no_grad():
        net(smooth_images(1))  # networks that register modules as they run do so now
    return net.eval()


def flat(output: Any) -> Tensor:
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("scheme", ["channel", "spatial", "3d"])
@pytest.mark.parametrize("forward", NETWORKS, ids=lambda f: f.__name__)
def test_exact_at_full_rank_or_left_alone(forward, scheme: str) -> None:
    net, images = build(forward), smooth_images(12)
    given = images.clone()
    ranks = full_ranks(net, images.clone(), scheme, ["a", "b", "c"])
    while True:
        try:
            result = leanconv.accelerate(net, images, ranks=ranks, scheme=scheme, skip=[], progress=False, samples=2000)
            break
        except leanconv.LeanconvError as error:
            refused = [name for name in ranks if f"{name!r}" in str(error)]
            if not refused:
                if "no layer is left" not in str(error):
                    raise
                return
            del ranks[refused[0]]
            if not ranks:
                return
    assert torch.equal(images, given), "the user's images were changed"
    fresh = smooth_images(4, seed=9)
    assert relative(flat(result.model(fresh.clone())), flat(net(fresh.clone()))) <= 1e-4
    assert survey(result.model, fresh[:1].clone()).macs == result.macs_after


def test_what_is_recognised() -> None:
    def sites(forward) -> dict[str, tuple]:
        found = survey(build(forward), smooth_images(2)).sites
        return {site.name: (site.batch_norm, site.activation.name, site.adds) for site in found}

    assert sites(returns_raw)["a"] == (None, "identity", 0)
    assert sites(writes_raw)["a"] == (None, "identity", 0)
    assert sites(drops)["a"] == ("bn", "relu", 0)
    assert sites(residual) == {"a": ("bn", "relu", 0), "b": (None, "identity", 1), "c": (None, "relu", 1)}
    assert sites(residual_in_place)["b"] == (None, "relu", 1)
    assert sites(doubles)["a"] == ("bn", "identity", 0)
    # Of two convolutions added up one is plain and comes first, the other is fitted with it as its shortcut.
    assert list(sites(sum_of_two).items())[1:] == [("b", (None, "identity", 0)), ("c", (None, "relu", 1))]


def test_a_loop_over_the_batch_is_seen() -> None:
    net = build(loops_over_the_batch)
    assert set(survey(net, smooth_images(2)).skipped.values()) == {reasons.USED_AGAIN}


def test_a_forward_set_on_the_layer_is_not_lost() -> None:
    net = build(residual)
    net.b.forward = types.MethodType(lambda self, x: nn.Conv2d.forward(self, x) * 3, net.b)
    assert survey(net, smooth_images(1)).skipped == {"b": reasons.CUSTOM}


def test_few_images_do_no_harm() -> None:
    """Fewer samples than channels, in float32: rounding must not be taken for signal."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for number, width in enumerate((16, 32, 64, 64)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()] + [nn.MaxPool2d(2)] * (number % 2)
        channels = width
    net = nn.Sequential(*layers).eval()
    for layer in net:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
            nn.init.normal_(layer.bias, 0, 0.3)
    fresh = torch.rand(16, 3, 16, 16)
    for count in (1, 2, 4, 16):
        images = torch.rand(count, 3, 16, 16)
        for scheme in ("channel", "3d"):
            result = leanconv.accelerate(net, images, 2.0, scheme=scheme, progress=False)
            assert relative(result.model(fresh), net(fresh)) < 0.5


@pytest.mark.parametrize("asymmetric", [False, True])
def test_more_filters_than_inputs(asymmetric: bool) -> None:
    """d > k k c: the rank limit is k k c, and unseen responses still lie in the range of the filters."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 48, 3), nn.ReLU(), nn.Conv2d(48, 8, 1)).eval()
    grey = smooth_images(8, channels=1).expand(-1, 3, -1, -1)
    result = leanconv.accelerate(
        net, grey, ranks={"0": 27}, scheme="channel", asymmetric=asymmetric, progress=False, samples=2000
    )
    colour = smooth_images(8, seed=4)
    assert relative(result.model(colour), net(colour)) <= 1e-4


def test_shortcut_aware_beats_shortcut_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Residual-aware asymmetric < the same without the shortcut, and < symmetric, in error of the last features."""
    import dataclasses

    import leanconv.pipeline.prepare as module

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x + self.b(F.relu(self.a(x))))

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), *[Block(24) for _ in range(4)]).eval()
    images, fresh = smooth_images(48), smooth_images(16, seed=8)

    def error(**arguments) -> float:
        result = leanconv.accelerate(net, images, 2.0, progress=False, samples=6000, **arguments)
        return relative(result.model(fresh), net(fresh))

    aware, symmetric = error(), error(asymmetric=False)

    def blind(*args, **kwargs):
        found = survey(*args, **kwargs)
        plain = [dataclasses.replace(s, adds=0, activation=type(s.activation)()) if s.adds else s for s in found.sites]
        return dataclasses.replace(found, sites=tuple(plain))

    monkeypatch.setattr(module, "survey", blind)
    assert aware < error()
    assert aware < symmetric


CONVS = [
    (nn.Conv1d, (2, 6, 20), {"kernel_size": 5, "padding": 2}),
    (nn.Conv1d, (2, 6, 21), {"kernel_size": 4, "padding": "same", "dilation": 2}),
    (nn.Conv1d, (2, 6, 20), {"kernel_size": 3, "stride": 2, "padding": 1, "padding_mode": "circular"}),
    (nn.Conv3d, (2, 6, 5, 6, 7), {"kernel_size": (3, 2, 3), "padding": (1, 0, 1), "stride": (1, 2, 1)}),
]


@pytest.mark.parametrize(("kind", "shape", "case"), CONVS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_one_and_three_dimensions(kind, shape: tuple[int, ...], case: dict) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(kind(6, 12, **case), nn.SiLU(), kind(12, 10, **case), nn.ReLU()).eval()
    images = torch.randn(40, *shape[1:])
    for scheme in ("channel", "3d"):
        result = leanconv.accelerate(net, images, ranks={"0": 12, "2": 10}, scheme=scheme, progress=False, samples=4000)
        assert relative(result.model(images), net(images)) <= 1e-4
    result = leanconv.accelerate(net, images, 1.5, skip=[], progress=False, samples=2000)
    assert 1.5 <= result.speedup < 1.53
    assert survey(result.model, images[:1]).macs == result.macs_after


def test_numbers_that_are_names_are_not_rounded() -> None:
    """Ids given as floats: a little less is another word, which says nothing about rounding."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(10, 8)
            self.a, self.b, self.c = nn.Conv1d(8, 8, 3), nn.Conv1d(8, 8, 1), nn.Conv1d(8, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(self.words(x.long()).transpose(1, 2))
            return self.c(3 * y + 0.6 * self.b(y))

    torch.manual_seed(0)
    net, ids = Words().eval(), torch.randint(10, (16, 12)).float()
    trial = Trial(net, ids)
    assert trial._rounding == [0.0]


def test_a_network_that_checks_its_input() -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

        def forward(self, x: Tensor) -> Any:
            if float(x.max()) > 1:
                raise ValueError("images must be in [0, 1]")
            y = self.b(F.relu(self.a(x)))
            return [y] * (1 + int(x[0, 0, 0, 0] * 1e9) % 2)

    torch.manual_seed(0)
    images = torch.rand(8, 3, 12, 12)
    images[:, :, 5, 5] = 1.0
    assert leanconv.accelerate(Strict().eval(), images, 1.3, progress=False, samples=500).speedup >= 1.3
