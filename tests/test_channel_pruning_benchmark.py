"""Channel pruning, the benchmark's: what goes costs what least squares says, and nothing where nothing is lost."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import channel_pruning
from pruning import Pruning

from leanconv.solve import elimination as elimination_module
from leanconv.solve.elimination import centred, elimination, numbers, of_inputs
from leanconv.solve.moments import Moments

TAPS = 4


def residual(x: Tensor, y: Tensor, channels: list[int]) -> float:
    """Of a direct least squares on some channels, a sample."""
    a = x[:, numbers(torch.tensor(channels), TAPS)]
    return float((y - a @ torch.linalg.lstsq(a, y).solution).square().sum() / len(x))


@pytest.mark.parametrize("step", [0.01, 0.3])
def test_growth_is_that_of_a_direct_least_squares(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    monkeypatch.setattr(elimination_module, "STEP", step)
    torch.manual_seed(0)
    x = torch.randn(300, 10 * TAPS, dtype=torch.float64) @ torch.randn(10 * TAPS, 10 * TAPS, dtype=torch.float64)
    y = x @ torch.randn(10 * TAPS, 3, dtype=torch.float64) + torch.randn(300, 3, dtype=torch.float64)
    order, growth = elimination(x.T @ x / 300, x.T @ y / 300, TAPS, 4)
    left = list(range(10))
    before = residual(x, y, left)
    for number, (gone, cost) in enumerate(zip(order, growth, strict=True)):
        if step < 0.1 or number == 0:  # one at a time: the best of all
            alone = {one: residual(x, y, [other for other in left if other != one]) for one in left}
            assert gone == min(alone, key=lambda one: alone[one])
        left.remove(gone)
        after = residual(x, y, left)
        assert after - before == pytest.approx(cost, rel=1e-6)
        before = after


def chain() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True), nn.Conv2d(8, 6, 3, padding=1)]
    model = nn.Sequential()
    model.add_module("features", nn.Sequential(*layers))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.uniform_(module.bias, 0.5, 1)  # no map is 0 by chance
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2)
    return model.eval()


def test_channels_that_say_nothing_new_go_for_nothing() -> None:
    model = chain()
    for at in (0, 4):
        convolution, norm = model.features[at], model.features[at + 1]
        with torch.no_grad():
            # One filter twice, one whose map is 0.
            for tensor in (convolution.weight, convolution.bias, norm.weight, norm.bias):
                tensor[5] = tensor[2]
            norm.running_mean[5], norm.running_var[5] = norm.running_mean[2], norm.running_var[2]
            norm.weight[7], norm.bias[7] = 0, -1
    pictures = torch.randn(32, 3, 12, 12)
    pruning = Pruning(model, pictures)
    pruned = pruning.prune([6, 6, 6])
    for kept in list(pruned.kept.values())[:2]:
        assert 7 not in kept
        assert len({2, 5} & set(kept.tolist())) == 1
    assert pruned.macs < pruning.macs
    with torch.no_grad():
        torch.testing.assert_close(pruned.model(pictures), model(pictures), rtol=0, atol=5e-3)


def test_nothing_is_pruned_where_nothing_is_to_go() -> None:
    model, pictures = chain(), torch.randn(16, 3, 12, 12)
    pruning = Pruning(model, pictures)
    pruned = pruning.prune([8, 8, 6])
    assert pruned.macs == pruning.macs
    with torch.no_grad():
        torch.testing.assert_close(pruned.model(pictures), model(pictures))
    keeps = pruning.keeps(1.5)
    assert keeps[-1] == 6
    assert pruning.macs / pruning.counted(keeps) >= 1.5


def test_moments_of_inputs_and_responses() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(50, 5) + 3, torch.randn(50, 2) - 1
    moments = of_inputs(Moments.of(torch.cat([x, y], 1)), torch.tensor([0, 3, 4]), 5)
    gram, cross, energy = centred(moments, 3)
    a, b = (part.double() - part.double().mean(0) for part in (x[:, [0, 3, 4]], y))
    torch.testing.assert_close(gram, a.T @ a / 50)
    torch.testing.assert_close(cross, a.T @ b / 50)
    torch.testing.assert_close(energy, b.square().sum() / 50)


def test_cells_that_are_known_keep_their_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those found beside other jobs have none; what was measured alone before stays."""
    row = {"macs": 1.0, "kl": 0.0, "agreement": 1.0, "features": 0.0, "seconds": 5.0}
    known = {"cells": [{"options": "plain", "speedup": 4.0, "factor": 1.0, **row, "seconds": 7.0}]}
    subject = SimpleNamespace(name="vgg16-cifar10", model=None, calibration=[torch.zeros(1)], labels=[0])
    options = Namespace(
        positions=1, samples=None, device="cpu", factors=[1.0], ways=["plain"], speedups=[4.0, 6.0], beside=True
    )
    monkeypatch.setattr(channel_pruning, "Pruning", lambda *_, **__: SimpleNamespace(macs=1))
    monkeypatch.setattr(channel_pruning, "cell", lambda *_, **__: dict(row))
    (found,) = channel_pruning.measured(subject, options, 1e18, known)
    assert [(cell["speedup"], cell["seconds"]) for cell in found["cells"]] == [(4.0, 7.0), (6.0, None)]
