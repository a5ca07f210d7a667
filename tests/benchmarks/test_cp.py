"""Other people's methods do what they say, or refuse in a sentence."""

from __future__ import annotations

import copy
import sys
from itertools import pairwise

import pytest
import tensorly
import torch
from torch import Tensor, nn

from benchmarks.common.initialise import initialise
from benchmarks.peers.cp import cp, cp_factors, cp_macs, cp_rank
from leanconv import LeanconvError, models
from leanconv.network.layers.kinds import geometry_of
from leanconv.pipeline.inspection import inspect_network
from tests.support.equality import relative
from tests.support.networks import plain_network


def rebuilt(factors: tuple[Tensor, ...]) -> Tensor:
    return torch.einsum("or,cr,yr,xr->ocyx", *factors)


def of_rank(rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return rebuilt(tuple(torch.randn(length, rank, generator=generator) for length in shape))


CASES = {
    "plain": nn.Conv2d(8, 12, 3),
    "padded": nn.Conv2d(8, 12, 3, padding=1),
    "no bias": nn.Conv2d(8, 12, 3, padding=1, bias=False),
    "strided": nn.Conv2d(8, 12, 3, stride=(2, 3), padding=1),
    "dilated": nn.Conv2d(8, 12, 3, dilation=(1, 2), padding=(0, 2)),
    "not square": nn.Conv2d(8, 12, (5, 3), padding=(2, 0)),
    "same": nn.Conv2d(8, 12, (5, 3), padding="same"),
    "reflect": nn.Conv2d(8, 12, 3, padding=1, padding_mode="reflect"),
    "circular": nn.Conv2d(8, 12, 5, padding=2, padding_mode="circular"),
    "1 x 1": nn.Conv2d(8, 12, 1),
    "double": nn.Conv2d(8, 12, 3, padding=1).double(),
}


@pytest.mark.parametrize("name", CASES)
def test_filters_of_exact_rank_come_back(name: str) -> None:
    layer = copy.deepcopy(CASES[name])
    layer.weight.data = of_rank(4, *layer.weight.shape).to(layer.weight)
    network = nn.Sequential(layer, nn.ReLU())
    before = copy.deepcopy(network.state_dict())
    x = torch.randn(2, 8, 11, 13, dtype=layer.weight.dtype)
    with torch.no_grad():
        replaced = cp(network, "0", 4, iterations=500)
        assert relative(replaced(x), network(x)) < 1e-5
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    kernels = [module.kernel_size for module in replaced.modules() if isinstance(module, nn.Conv2d)]
    height, width = layer.kernel_size
    assert kernels == [(1, 1), (height, 1), (1, width), (1, 1)]


def test_error_falls_with_the_rank() -> None:
    weight = torch.randn(16, 12, 3, 3, generator=torch.Generator().manual_seed(0))
    errors = [relative(rebuilt(cp_factors(weight, rank)), weight) for rank in (1, 8, 32, 64)]
    assert all(larger > smaller for larger, smaller in pairwise(errors))
    assert errors[0] < 1
    assert errors[-1] < 0.5


def test_factors_share_the_scale_and_repeat() -> None:
    weight = 1000 * torch.randn(6, 5, 3, 2, generator=torch.Generator().manual_seed(0))
    factors = cp_factors(weight, 7)
    assert [tuple(factor.shape) for factor in factors] == [(6, 7), (5, 7), (3, 7), (2, 7)]
    for factor in factors[1:]:
        assert torch.allclose(factor.norm(dim=0), factors[0].norm(dim=0))
    assert all(torch.equal(one, other) for one, other in zip(factors, cp_factors(weight, 7), strict=True))
    assert not torch.equal(factors[0], cp_factors(weight, 7, seed=1)[0])


def test_dead_filters_and_generous_ranks_are_no_trouble() -> None:
    weight = of_rank(2, 6, 5, 3, 3)
    weight[2:4] = 0
    assert relative(rebuilt(cp_factors(weight, 9)).float(), weight) < 1e-3
    assert not rebuilt(cp_factors(torch.zeros(6, 5, 3, 3), 2)).any()


def test_the_users_state_is_untouched() -> None:
    state, backend = torch.get_rng_state(), tensorly.get_backend()
    cp_factors(torch.ones(3, 3, 3, 3), 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert tensorly.get_backend() == backend == "numpy"


def test_macs_are_those_of_the_four_layers() -> None:
    layer = nn.Conv2d(8, 12, (5, 3), stride=(2, 1), padding=1)
    replaced = cp(nn.Sequential(layer, nn.ReLU()), "0", 6, iterations=1)
    counted = inspect_network(replaced, None, shape=(1, 8, 17, 14)).survey.macs
    assert cp_macs(geometry_of(layer), (17, 14), 6) == counted


@pytest.mark.parametrize("speedup", [1.0, 2.5, 4.0])
def test_rank_for_a_speedup_is_the_largest(speedup: float) -> None:
    network, layer, shape = models.character_cnn().eval(), "2", (1, 1, 24, 24)
    rank = cp_rank(network, layer, shape, speedup)
    dense = next(item for item in inspect_network(network, None, shape=shape).survey.layers if item.name == layer)
    geometry = geometry_of(network.get_submodule(layer))
    assert cp_macs(geometry, (16, 16), rank) <= dense.macs / speedup < cp_macs(geometry, (16, 16), rank + 1)


def test_a_replaced_layer_can_start_from_scratch() -> None:
    """The factors go into one another without a ReLU between: only the last has gain 2."""
    layer = nn.Conv2d(64, 64, 3, padding=1, padding_mode="circular")
    network = initialise(cp(nn.Sequential(layer, nn.ReLU()), "0", 256, iterations=1))
    x = torch.randn(8, 64, 12, 12, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert float(network[0](x).square().mean()) == pytest.approx(2, rel=0.2)


class Odd(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def test_refusals_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.Conv1d(8, 8, 3),
        Odd(8, 8, 3),
        nn.Conv2d(8, 8, 3),
    )
    network[5].register_forward_hook(lambda *_: None)
    for layer, sentence in {
        "conv": "layer names the layer 'conv', which does not exist; known: 0, 2",
        "": "layer names the layer ''",
        "1": "layer '1' is a ReLU; CP takes a torch.nn.Conv2d",
        "2": "layer '2' has 2 groups; CP takes a Conv2d with groups=1",
        "3": "layer '3' is a Conv1d; CP takes a torch.nn.Conv2d",
        "4": "layer '4' is a Odd",
        "5": "layer '5' carries hooks, whose work would be lost",
    }.items():
        with pytest.raises(LeanconvError, match=sentence):
            cp(network, layer, 4)
    for rank in (0, -3, 2.5, True):
        with pytest.raises(LeanconvError, match=f"rank={rank!r} must be a whole number from 1"):
            cp(network, "0", rank)  # type: ignore[arg-type]
    with pytest.raises(LeanconvError, match=r"weight has shape \(8, 3, 3\)"):
        cp_factors(torch.ones(8, 3, 3), 2)
    with pytest.raises(LeanconvError, match="NaN or infinite"):
        cp_factors(torch.full((2, 2, 3, 3), torch.nan), 2)
    with pytest.raises(LeanconvError, match="model is a str"):
        cp("network", "0", 2)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "tensorly", None)  # as if not installed
    with pytest.raises(LeanconvError, match="pip install tensorly"):
        cp(network, "0", 2)


def test_refusals_of_a_speedup() -> None:
    network = plain_network()
    with pytest.raises(LeanconvError, match=r"can become at most .* speedup=1000 is too much"):
        cp_rank(network, "3", (1, 3, 16, 16), 1000)
    with pytest.raises(LeanconvError, match="speedup=0 must be a number above 0"):
        cp_rank(network, "3", (1, 3, 16, 16), 0)
    with pytest.raises(LeanconvError, match="takes 3 input channels but was given 5"):
        cp_rank(network, "3", (1, 5, 16, 16), 2)
    shared = nn.Conv2d(3, 3, 3, padding=1)
    with pytest.raises(LeanconvError, match="layer '0' cannot be replaced: used more than once"):
        cp_rank(nn.Sequential(shared, nn.ReLU(), shared), "0", (1, 3, 16, 16), 2)
