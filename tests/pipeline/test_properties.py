"""Random convolutions in random small graphs: exact at full rank, the ratio met, nothing of the user's touched.

100 networks in ``make test``, always the same; ``make nightly`` draws 2,000 new ones.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import leanconv
from leanconv.network.survey import survey
from tests.support.equality import relative
from tests.support.networks import full_ranks, settle_batch_norms
from tests.support.reasons import ALL

CASES = int(os.environ.get("LEANCONV_CASES", "100"))
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
POOLS = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
SIDE = {1: 24, 2: 11, 3: 7}
ACTIVATIONS: dict[str, Any] = {
    "none": lambda y: y,
    "relu": F.relu,
    "relu in place": lambda y: y.relu_(),
    "silu": F.silu,
    "leaky": lambda y: F.leaky_relu(y, 0.2),
    "relu6": F.relu6,
    "tanh": torch.tanh,
    "unknown": torch.sin,
}
GRAPHS = ("chain", "residual", "shortcut", "concat", "shared", "gated", "before", "linked")


@dataclass(frozen=True)
class Spec:
    """One network: the attributes of its middle convolution and what is built around it."""

    graph: str
    dimensions: int
    width: int  # channels of the stem
    filters: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...] | str
    padding_mode: str
    groups: int
    bias: bool
    norm: bool
    activation: str
    made: str
    channels_last: bool
    dtype: torch.dtype
    seed: int


@st.composite
def specs(draw: st.DrawFn, graph: str) -> Spec:
    dimensions = draw(st.sampled_from((2, 2, 2, 1, 3)))
    keeps_size = graph in ("residual", "shortcut", "shared", "gated")
    groups = draw(st.sampled_from((1, 1, 2)))
    width = draw(st.integers(2, 4)) * groups
    filters = width if graph in ("residual", "shared") else draw(st.integers(1, 5)) * groups

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dimensions))

    stride = (1,) * dimensions if keeps_size else each(1, 3)
    named = ("valid", "same") if max(stride) == 1 else ("valid",)
    padding = "same" if keeps_size else draw(st.sampled_from((each(0, 1), each(0, 1), *named)))
    return Spec(
        graph=graph,
        dimensions=dimensions,
        width=width,
        filters=filters,
        kernel=each(1, 4 if dimensions < 3 else 3),
        stride=stride,
        dilation=each(1, 2 if dimensions < 3 else 1),
        padding=padding,
        padding_mode=draw(st.sampled_from(("zeros", "zeros", "reflect", "replicate", "circular"))),
        groups=groups,
        bias=draw(st.booleans()),
        norm=draw(st.booleans()),
        activation=draw(st.sampled_from(tuple(ACTIVATIONS))),
        made=draw(st.sampled_from(("plain", "plain", "weight norm", "subclass"))),
        channels_last=dimensions == 2 and draw(st.booleans()),
        dtype=draw(st.sampled_from((torch.float32, torch.float64))),
        seed=draw(st.integers(0, 10_000)),
    )


class Twofold(nn.Module):
    """A convolution of another class: its weight is computed, its map padded on one side."""

    def forward(self, x: Tensor) -> Tensor:
        dimensions = x.dim() - 2
        if self.padding_mode == "zeros" and self.padding == (1,) * dimensions:
            x = F.pad(x, (0, 1) * dimensions)
        return self._conv_forward(x, self.weight * 2, self.bias)


class Twofold1d(Twofold, nn.Conv1d):
    pass


class Twofold2d(Twofold, nn.Conv2d):
    pass


class Twofold3d(Twofold, nn.Conv3d):
    pass


class Drawn(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        torch.manual_seed(spec.seed)
        self.spec = spec
        conv, norm = CONVS[spec.dimensions], NORMS[spec.dimensions]
        self.stem = conv(3, spec.width, 3, padding=1)
        kind = {1: Twofold1d, 2: Twofold2d, 3: Twofold3d}[spec.dimensions] if spec.made == "subclass" else conv
        self.middle, self.other = (
            kind(
                spec.width,
                spec.filters,
                spec.kernel,
                spec.stride,
                spec.padding,
                spec.dilation,
                spec.groups,
                spec.bias,
                spec.padding_mode,
            )
            for _ in range(2)
        )
        if spec.made == "weight norm":
            self.middle = nn.utils.parametrizations.weight_norm(self.middle)
        self.norm = norm(spec.filters) if spec.norm else nn.Identity()
        self.side = conv(spec.width, spec.filters, 1)
        self.before = norm(spec.width)
        channels = 2 * spec.filters if spec.graph == "concat" else spec.filters
        self.point = conv(channels, 4, 1)
        self.last = conv(4, 5, 2, bias=False)
        settle_batch_norms(self, spec.seed)
        self.to(spec.dtype)
        if spec.channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        graph, r = self.spec.graph, ACTIVATIONS[self.spec.activation]
        x = F.relu(self.stem(x))
        if graph == "before":
            x = F.relu(self.before(x))
        y = self.norm(self.middle(x))
        if graph == "residual":
            y = y + x
        elif graph == "shortcut":
            y += self.side(x)
        elif graph == "shared":
            y = self.norm(self.middle(r(y)))
        elif graph == "gated":
            y = y * torch.sigmoid(self.side(POOLS[self.spec.dimensions](x, 1)))
        elif graph == "concat":
            y = torch.cat([y, self.other(x)], 1)
        if graph != "linked":
            y = r(y)
        return self.last(F.elu(self.point(y)))  # never all zero


def check(spec: Spec, scheme: str, solver: str, asymmetric: bool, wish: float) -> None:
    net = Drawn(spec).eval()
    shape = (10, 3, *[SIDE[spec.dimensions]] * spec.dimensions)
    generator = torch.Generator().manual_seed(spec.seed)
    images, fresh = (torch.randn(shape, generator=generator).to(spec.dtype) for _ in range(2))
    given_images, state, wanted = images.clone(), {k: v.clone() for k, v in net.state_dict().items()}, net(fresh)
    common: dict[str, Any] = {
        "scheme": scheme,
        "solver": solver,
        "asymmetric": asymmetric,
        "skip": [],
        "samples": 400,
        "progress": False,
    }
    names = [site.name for site in survey(net, images[:2].clone()).sites]
    ranks = full_ranks(net, images, scheme, names)
    if ranks:
        whole = leanconv.accelerate(net, images, ranks=ranks, **common)
        assert len(whole.layers) == len(ranks)
        assert relative(whole.model(fresh), wanted) <= (1e-4 if spec.dtype == torch.float32 else 1e-9)
        assert survey(whole.model, images[:1].clone()).macs == whole.macs_after
    most = leanconv.reachable(net, images, scheme, [])
    speedup = 1 + wish * (most - 1)
    try:
        result = leanconv.accelerate(net, images, speedup, **common)
    except leanconv.LeanconvError as error:
        # So few filters that no plan lands in the window; the one it names must.
        nearest = re.search(r"gives ([\d.]+)x: ask for that", str(error))
        event("too coarse" if nearest else "nothing cheaper")
        if nearest is None and (most <= 1.005 or spec.graph == "linked"):
            return  # what merging adds to the reachable is not always met to within 2 %
        if nearest is None:
            raise
        speedup = float(nearest[1])
        result = leanconv.accelerate(net, images, speedup, **common)
    assert speedup <= result.speedup < 1.02 * speedup
    assert survey(result.model, images[:1].clone()).macs == result.macs_after
    assert result.model(fresh).shape == wanted.shape
    assert set(result.skipped.values()) <= set(ALL)
    assert set(result.skipped).isdisjoint(layer.name for layer in result.layers)
    with tempfile.TemporaryDirectory() as folder:
        result.save(Path(folder) / "net")
        loaded = leanconv.load(Path(folder) / "net", model=Drawn(spec))
        if not spec.channels_last:  # other kernels run then, which round otherwise
            assert torch.equal(loaded(fresh), result.model(fresh))
    assert torch.equal(images, given_images)
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
    assert torch.equal(net(fresh), wanted)


@pytest.mark.parametrize("graph", GRAPHS)
@settings(
    max_examples=-(-CASES // len(GRAPHS)),
    deadline=None,
    derandomize="LEANCONV_CASES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
@given(
    data=st.data(),
    scheme=st.sampled_from(("channel", "spatial", "3d", "3d")),
    solver=st.sampled_from(("linear", "nonlinear")),
    asymmetric=st.booleans(),
    wish=st.floats(0.05, 0.9),
)
def test_random_networks(
    graph: str, data: st.DataObject, scheme: str, solver: str, asymmetric: bool, wish: float
) -> None:
    check(data.draw(specs(graph)), scheme, solver, asymmetric, wish)
