"""Facts about the optimizer of distillation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from leanconv.train.optimizers import SHARE, Muon, optimizers, orthogonal
from leanconv.train.settings import FinetuneConfig
from tests.support.training import SETTINGS


def settings(**given) -> FinetuneConfig:
    return FinetuneConfig(**{**SETTINGS, "distill": True, **given})


@pytest.mark.parametrize("shape", [(8, 30), (30, 8), (12, 12), (1, 9), (9, 1)])
def test_singular_values_become_one_and_their_vectors_stay(shape):
    draw = torch.Generator().manual_seed(0)
    left, values, right = torch.linalg.svd(torch.randn(shape, generator=draw), full_matrices=False)
    values = torch.logspace(0, -1.5, len(values))  # one direction thirty times as strong as another
    found = orthogonal(left * values @ right)
    inner = left.T @ found @ right.T
    assert torch.allclose(inner, torch.diag(inner.diagonal()), atol=1e-4)
    assert inner.diagonal().min() > 0.65
    assert inner.diagonal().max() < 1.2


def test_nothing_moves_without_a_gradient():
    assert torch.equal(orthogonal(torch.zeros(3, 5)), torch.zeros(3, 5))
    still, moved = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    moved.grad = torch.eye(2)
    Muon([still, moved], 0.1).step()
    assert torch.equal(still, torch.ones(2, 2))
    assert not torch.equal(moved, torch.ones(2, 2))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("slope", [1e-6, 1e3])
def test_a_step_is_a_share_of_the_weights(scale, slope):
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, 3, 1, generator=draw)
    weights = nn.Parameter(scale * start)
    weights.grad = slope * torch.randn(6, 4, 3, 1, generator=draw)
    Muon([weights], 0.01).step()
    change = float((weights.detach() - scale * start).norm() / (scale * start).norm())
    assert 0.007 < change < 0.012


def test_weak_directions_are_learnt_too():
    """Inputs vary a thousand times more in one direction than in another: what is left behind 200 steps, by Muon and by
    Adam at the best of three rates."""
    draw = torch.Generator().manual_seed(0)
    turn, _ = torch.linalg.qr(torch.randn(20, 20, generator=draw))
    inputs = torch.randn(500, 20, generator=draw) * torch.logspace(0, -3, 20).sqrt() @ turn
    start, goal = torch.randn(2, 8, 20, generator=draw)

    def left_over(make) -> float:
        weights = nn.Parameter(start.clone())
        optimizer = make([weights])
        for step in range(200):
            optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * (1 - step / 200)
            optimizer.zero_grad()
            loss = (inputs @ (weights - goal).T).square().mean()
            loss.backward()
            optimizer.step()
        return float(loss.detach())

    rates = (0.003, 0.01, 0.03)
    ours = min(left_over(lambda given, rate=rate: Muon(given, rate)) for rate in rates)
    adam = min(left_over(lambda given, rate=rate: torch.optim.Adam(given, rate)) for rate in rates)
    assert ours < 0.5 * adam


def test_what_is_no_matrix_is_adams():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 8, 1, bias=False),
        nn.Flatten(),
        nn.Linear(8, 2),
    )
    nn.init.zeros_(model[3].weight)
    model[5].weight.requires_grad_(False)
    muon, adam = optimizers(model, "muon", 1e-3, torch.device("cpu"))
    named = {id(weights): name for name, weights in model.named_parameters()}
    own = [[named[id(weights)] for weights in one.param_groups[0]["params"]] for one in (muon, adam)]
    assert own == [["0.weight"], ["0.bias", "1.weight", "1.bias", "2.weight", "2.bias", "3.weight", "5.bias"]]
    assert [one.param_groups[0]["share"] for one in (muon, adam)] == [1.0, SHARE]


def test_a_network_of_norms_alone_has_only_adam():
    assert [type(one).__name__ for one in optimizers(nn.BatchNorm2d(3), "muon", 1e-3, torch.device("cpu"))] == ["AdamW"]


def test_weights_shared_by_two_layers_move_once():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    (muon,) = optimizers(nn.Sequential(first, second), "muon", 1e-3, torch.device("cpu"))
    assert len(muon.param_groups[0]["params"]) == 1


def test_a_layer_that_no_longer_matters_stays_where_it_is():
    """Behind a ReLU that has died the gradient is zero, and the momentum falls to what squares to nothing."""
    weights = nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))
    optimizer = Muon([weights], 0.002)
    weights.grad = torch.eye(6)
    optimizer.step()
    moved = weights.detach().clone()
    weights.grad = torch.zeros(6, 6)
    for _ in range(2000):
        optimizer.step()
    assert torch.equal(weights, moved)


@pytest.mark.parametrize("size", [1e-30, 1e-23, 1e-10, 1e20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_direction_does_not_depend_on_the_size(size, dtype):
    matrix = torch.randn(4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = orthogonal((size * matrix).to(dtype)).double()
    assert found.dtype == torch.float64
    assert torch.allclose(found, orthogonal(matrix), atol=0.1 if dtype == torch.bfloat16 else 1e-4)
    assert orthogonal((1e-40 * matrix).to(dtype)).isfinite().all()
