"""The one call: exact at full rank, on target, better in the paper's order, and harmless to its inputs."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import leanconv
from leanconv import LeanconvError
from leanconv.config import Refine
from leanconv.network import reasons
from leanconv.network.survey import survey
from tests.support.equality import relative
from tests.support.networks import CONV_CASES, full_ranks, network_of, plain_network
from tests.support.pictures import smooth_images
from tests.support.runs import accelerate

SCHEMES = ["channel", "spatial", "3d"]


@pytest.mark.parametrize("refine", [None, "none"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("case", CONV_CASES)
def test_full_rank_reproduces_the_network(case: str, scheme: str, refine: Refine | None) -> None:
    model, images = network_of(CONV_CASES[case]), smooth_images(16)
    ranks = full_ranks(model, images, scheme, ["2", "5"])
    for asymmetric in (False, True):
        for solver in ("linear", "nonlinear"):
            way = {"scheme": scheme, "asymmetric": asymmetric, "solver": solver, "refine": refine}
            result = accelerate(model, images, ranks=ranks, **way)
            assert len(result.layers) == len(ranks)
            fresh = smooth_images(8, seed=5)
            assert relative(result.model(fresh), model(fresh)) <= 1e-4


@pytest.mark.parametrize("scheme", SCHEMES)
def test_full_rank_whole_network(scheme: str, network: nn.Module, pictures: Tensor) -> None:
    ranks = full_ranks(network, pictures, scheme, ["0", "3", "7", "10"])
    result = accelerate(network, pictures, ranks=ranks, scheme=scheme, skip=[], samples=4000)
    assert [layer.name for layer in result.layers] == ["0", "3", "7", "10"]
    fresh = smooth_images(8, seed=3)
    assert relative(result.model(fresh), network(fresh)) <= 1e-4


@pytest.mark.parametrize("ranks", ["uniform", "energy"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_speedup_is_met_and_counted_honestly(scheme: str, ranks: str, network: nn.Module, pictures: Tensor) -> None:
    result = accelerate(network, pictures, 2.5, scheme=scheme, ranks=ranks)
    assert 2.5 <= result.speedup < 2.5 * 1.02
    # Counted again by running the accelerated network: every factor is there.
    assert survey(result.model, pictures[:1]).macs == result.macs_after
    assert survey(network, pictures[:1]).macs == result.macs_before
    assert result.parameters_after == sum(p.numel() for p in result.model.parameters())
    assert not result.model.training
    for layer in result.layers:
        assert layer.macs_after < layer.macs_before
        assert 0 < layer.energy <= 1
        assert 0 <= layer.error < 2


def error_of(model: nn.Module, images: Tensor, **arguments) -> float:
    result = accelerate(model, images, **arguments)
    fresh = smooth_images(32, seed=11)
    return relative(result.model(fresh), model(fresh))


def test_the_papers_order() -> None:
    model, images = plain_network((24, 32, 48, 48, 64), batch_norm=False), smooth_images(48)
    common = {"speedup": 3.0, "scheme": "channel", "ranks": "uniform", "samples": 6000, "refine": "none"}
    linear = error_of(model, images, solver="linear", asymmetric=False, **common)
    nonlinear = error_of(model, images, asymmetric=False, **common)
    asymmetric = error_of(model, images, **common)
    assert asymmetric < nonlinear < linear


def test_input_is_untouched(network: nn.Module, pictures: Tensor) -> None:
    network.train()
    network[3].eval()
    handle = network[-1].register_forward_hook(lambda *_: None)
    state = copy.deepcopy(network.state_dict())
    modes = [module.training for module in network.modules()]
    modules = dict(network.named_modules())
    hooks = {name: list(module._forward_hooks) for name, module in modules.items()}
    rng = torch.get_rng_state(), random.getstate(), np.random.get_state()
    loader = DataLoader(TensorDataset(pictures, torch.zeros(len(pictures))), 8, shuffle=True)
    for bad in (False, True):
        if bad:
            with pytest.raises(LeanconvError):
                accelerate(network, loader, 10_000.0)
        else:
            accelerate(network, loader)
        assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())
        assert [module.training for module in network.modules()] == modes
        assert dict(network.named_modules()) == modules
        assert {name: list(module._forward_hooks) for name, module in modules.items()} == hooks
        assert torch.equal(torch.get_rng_state(), rng[0])
        assert random.getstate() == rng[1]
        assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), rng[2], strict=True))
    handle.remove()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_same_seed_same_bits(scheme: str, network: nn.Module, pictures: Tensor) -> None:
    a, b = (accelerate(network, pictures, scheme=scheme, samples=500, seed=3) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a.model.parameters(), b.model.parameters(), strict=True))
    if scheme != "spatial":
        other = accelerate(network, pictures, scheme=scheme, samples=500, seed=4)
        assert any(not torch.equal(x, y) for x, y in zip(a.model.parameters(), other.model.parameters(), strict=False))


def test_every_form_of_images_gives_the_same(network: nn.Module, pictures: Tensor) -> None:
    labels = torch.arange(len(pictures))
    forms = [
        list(pictures.split(8)),
        (batch for batch in pictures.split(8)),
        [(batch, None) for batch in pictures.split(8)],
        DataLoader(TensorDataset(pictures, labels), batch_size=8),
    ]
    results = [accelerate(network, form) for form in forms]
    expected = results[0].model(pictures)
    assert all(torch.equal(result.model(pictures), expected) for result in results)


def test_skip(network: nn.Module, pictures: Tensor) -> None:
    default = accelerate(network, pictures)
    assert default.skipped == {"0": reasons.FIRST}
    assert "0" in [layer.name for layer in accelerate(network, pictures, skip=[]).layers]
    chosen = accelerate(network, pictures, 1.5, skip=["3", "0"])
    assert chosen.skipped == {"0": reasons.ASKED, "3": reasons.ASKED}
    assert [layer.name for layer in chosen.layers] == ["7", "10"]


def test_ranks_by_hand(network: nn.Module, pictures: Tensor) -> None:
    result = accelerate(network, pictures, ranks={"7": (20, 9)}, scheme="3d")
    assert [(layer.name, layer.scheme, layer.ranks) for layer in result.layers] == [("7", "3d", (20, 9))]
    assert set(result.skipped.values()) == {reasons.FIRST, reasons.NOT_NAMED}
    factors = result.model[7]
    assert [tuple(f.weight.shape) for f in factors] == [(20, 24, 3, 1), (9, 20, 1, 3), (32, 9, 1, 1)]
    assert isinstance(result.model[8], nn.Identity)
    assert "0" in [layer.name for layer in accelerate(network, pictures, ranks={"0": 5}, scheme="channel").layers]


def test_linear_layers_are_sites_when_asked(pictures: Tensor) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 64), nn.GELU(), nn.Linear(64, 5)
    ).eval()
    result = accelerate(model, pictures, 2.0, layers="all", scheme="channel")
    assert 2.0 <= result.speedup < 2.04
    assert [type(f) for f in result.model[3]] == [nn.Linear, nn.Linear]
    assert survey(result.model, pictures[:1], layers="all").macs == result.macs_after
    with pytest.raises(LeanconvError, match="no layer is left"):
        accelerate(model, pictures, 2.0)


def test_dtypes_and_memory_format_are_kept(pictures: Tensor) -> None:
    for dtype, tolerance in ((torch.float64, 0.5), (torch.bfloat16, 0.6)):
        model = plain_network().to(dtype)
        result = accelerate(model, pictures.to(dtype), 1.5)
        assert {p.dtype for p in result.model.parameters()} == {dtype}
        output = result.model(pictures.to(dtype))
        assert output.dtype == dtype
        assert relative(output.float(), model(pictures.to(dtype)).float()) < tolerance
    model = plain_network().to(memory_format=torch.channels_last)
    result = accelerate(model, pictures, 1.5)
    assert result.model[3][0].weight.is_contiguous(memory_format=torch.channels_last)


def test_residual_and_odd_networks_stay_right(pictures: Tensor) -> None:
    """Sums, concatenation and re-use: what is done must be exact at full rank, the rest left alone."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.b, self.shared = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.stem(x))
            y = F.relu(x + self.b(F.relu(self.a(x))))
            z = torch.cat([x, y], 1)
            return self.shared(F.relu(self.shared(z)))

    torch.manual_seed(0)
    model = Residual().eval()
    ranks = {"a": (24, 8), "b": (24, 8)}
    result = accelerate(model, pictures, ranks=ranks)
    assert relative(result.model(pictures), model(pictures)) <= 1e-4
    assert result.skipped["shared"] == reasons.USED_AGAIN


def test_layers_that_would_not_be_cheaper_stay_dense(pictures: Tensor) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 80, 3, padding=1), nn.ReLU(), nn.Conv2d(80, 80, 3, padding=1), nn.ReLU(), nn.Conv2d(80, 1, 1)
    ).eval()
    result = accelerate(model, pictures, 2.0, scheme="channel")
    assert result.skipped["4"] == reasons.NOT_CHEAPER
    spatial = accelerate(model, pictures, 2.0, scheme="spatial")
    assert spatial.skipped["4"] == reasons.NOT_SPATIAL


def test_result_prints_a_table(network: nn.Module, pictures: Tensor) -> None:
    result = accelerate(network, pictures)
    text = str(result)
    assert all(layer.name in text for layer in result.layers)
    assert f"{result.speedup:.3f}x fewer MACs" in text
    assert reasons.FIRST in text


def test_progress_falls_back_to_plain_lines(network: nn.Module, pictures: Tensor, capsys) -> None:
    leanconv.accelerate(network, pictures, 2.0, samples=500)
    lines = capsys.readouterr().err.splitlines()
    assert any("original network: done in" in line for line in lines)
    assert any("measuring layers: done in" in line for line in lines)
    assert any("solving: 3/3 10 " in line for line in lines)


def test_numpy_numbers_are_numbers(network: nn.Module, pictures: Tensor) -> None:
    assert accelerate(network, pictures, np.float32(2.0)).speedup >= 2.0
    result = accelerate(network, pictures, ranks={"7": np.int64(9)}, scheme="channel")
    assert result.layers[0].ranks == (9,)


def test_the_seed_cuda_will_start_with_is_untouched(network: nn.Module, pictures: Tensor) -> None:
    torch.manual_seed(123)
    before = [entry[0] for entry in torch.cuda._queued_calls] if hasattr(torch.cuda, "_queued_calls") else []
    accelerate(network, pictures)
    after = [entry[0] for entry in torch.cuda._queued_calls] if hasattr(torch.cuda, "_queued_calls") else []
    assert len(after) == len(before)


def test_inference_mode_gives_a_network_that_can_be_trained(network: nn.Module, pictures: Tensor) -> None:
    with torch.inference_mode():
        result = accelerate(network, pictures)
    result.model(pictures).sum().backward()
    assert all(p.grad is not None for p in result.model.parameters())


def test_buffers_that_count_runs_come_back_as_given(pictures: Tensor) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("runs", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            return x

    model = nn.Sequential(*plain_network(), Counts()).eval()
    assert float(accelerate(model, pictures).model[-1].runs) == 0
    assert float(model[-1].runs) == 0


def test_dict_batches_and_images_that_want_gradients(network: nn.Module, pictures: Tensor) -> None:
    class TakesDict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network

        def forward(self, batch: dict) -> Tensor:
            return self.net(batch["image"])

    batches = [{"image": batch, "name": "x"} for batch in pictures.split(8)]
    tensors = [batch.requires_grad_() for batch in pictures.clone().split(8)]
    # Tensors may go through in other batches than they came in, dicts may not: the same but for rounding, and, where
    # gradients of the output are taken, for the random vectors that the images of a batch get.
    for more, most in (({"refine": "none"}, 1e-4), ({}, 0.01)):
        by_dict, plain = accelerate(TakesDict().eval(), batches, **more), accelerate(network, tensors, **more)
        assert relative(by_dict.model(batches[0]), plain.model(pictures[:8])) < most


def test_arguments_stand_in_the_order_of_the_contract(network: nn.Module, pictures: Tensor) -> None:
    result = leanconv.accelerate(
        network, pictures, 2.0, "channel", "linear", False, "uniform", ["0"], 1, "cpu", False, None, samples=300
    )
    assert result.options.scheme == "channel"
    assert result.options.seed == 1
