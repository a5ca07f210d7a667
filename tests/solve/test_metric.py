"""Regression that keeps the directions a metric asks for, and sums in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leanconv.solve import Metric, ResponseSpace, activation, parted, unseen
from leanconv.solve.metric import DAMPING, POWER
from leanconv.solve.moments import Products, Sums, chunks
from leanconv.solve.reduced_rank import LowRank, Regressor, linear
from tests.support.equality import relative

D = 20


def samples(n: int = 3000, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Targets, and inputs that nearly say them."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(D, D, generator=g, dtype=torch.float64) * torch.logspace(0, -1, D, dtype=torch.float64)
    y = torch.randn(n, D, generator=g, dtype=torch.float64) @ mix.T + 0.5
    turn = torch.eye(D, dtype=torch.float64) + 0.2 * torch.randn(D, D, generator=g, dtype=torch.float64)
    return y @ turn.T + 0.1 * torch.randn(n, D, generator=g, dtype=torch.float64), y


def gram(seed: int = 7) -> Tensor:
    """Of gradients that feel some directions a hundred times as much as others."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(200, D, generator=g, dtype=torch.float64) * torch.logspace(0, -2, D, dtype=torch.float64)
    turned = rows @ torch.linalg.qr(torch.randn(D, D, generator=g, dtype=torch.float64)).Q
    return turned.T @ turned


def fitted(z: Tensor, y: Tensor, rank: int, metric: Metric | None, space: ResponseSpace | None = None) -> LowRank:
    space = space or ResponseSpace.anywhere(y)
    x = space.coordinates(y)
    sums = Sums.of(z, y, x)
    regressor = Regressor.with_moments(sums.moments, x, space, metric)
    return regressor.on_responses(linear(sums, rank, regressor, y.dtype))


def felt(error: Tensor, metric: Metric) -> float:
    return float((error @ metric.root.T).square().sum())


def metric_of(matrix: Tensor) -> Metric:
    found = Metric.of(matrix)
    assert found is not None
    return found


def test_its_root_is_of_the_gradients_and_a_little_noise() -> None:
    g = gram()
    for size in (1e-12, 1.0, 1e12):
        root = metric_of(size * g).root
        wanted = g / g.diagonal().mean() + DAMPING * torch.eye(D, dtype=torch.float64)
        torch.testing.assert_close(torch.linalg.matrix_power(root, round(2 / POWER)), wanted)
        torch.testing.assert_close(root @ metric_of(size * g).inverse, torch.eye(D, dtype=torch.float64))


def test_gradients_that_say_nothing_are_no_metric() -> None:
    for size in (0.0, float("nan"), float("inf")):
        assert Metric.of(size * torch.eye(D, dtype=torch.float64)) is None


@pytest.mark.parametrize("rank", [1, 4, 12, 19])
def test_no_map_of_that_rank_has_a_smaller_error(rank: int) -> None:
    """Against the truncated SVD of the whole regression in the metric's coordinates, in which an error is a length."""
    (z, y), metric = samples(), metric_of(gram())
    found = felt(z - fitted(z, y, rank, metric)(y), metric)
    yc, zc = y - y.mean(0), (z - z.mean(0)) @ metric.root.T
    predicted = yc @ torch.linalg.lstsq(yc, zc).solution
    u, s, v = torch.linalg.svd(predicted, full_matrices=False)
    best = float((zc - (u[:, :rank] * s[:rank]) @ v[:rank]).square().sum())
    assert found == pytest.approx(best, rel=1e-6)
    plain = fitted(z, y, rank, None)
    assert found < 0.999 * felt(z - plain(y), metric)
    unit = metric_of(torch.eye(D, dtype=torch.float64))
    assert felt(z - plain(y), unit) < felt(z - fitted(z, y, rank, metric)(y), unit)


def test_at_full_rank_it_makes_no_difference() -> None:
    z, y = samples()
    assert relative(fitted(z, y, D, metric_of(gram()))(y), fitted(z, y, D, None)(y)) < 1e-9


@pytest.mark.parametrize("rank", [1, 7])
def test_where_all_directions_are_felt_alike_it_makes_no_difference(rank: int) -> None:
    z, y = samples()
    found = fitted(z, y, rank, metric_of(3 * torch.eye(D, dtype=torch.float64)))
    assert relative(found(y), fitted(z, y, rank, None)(y)) < 1e-9


def test_free_filters_have_the_least_error_of_that_rank_too() -> None:
    """Of inputs of 12 numbers, of which responses were made."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(2000, 12, generator=g, dtype=torch.float64)
    filters, before = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((D, 4, 1, 3), (4, 6)))
    y = x @ filters.flatten(1).T
    z, metric = y.tanh() + 0.1 * torch.randn(y.shape, generator=g, dtype=torch.float64), metric_of(gram())
    found = fitted(z, y, 3, metric, ResponseSpace.behind(x, filters, before))
    xc, zc = x - x.mean(0), (z - z.mean(0)) @ metric.root.T
    u, s, v = torch.linalg.svd(xc @ torch.linalg.lstsq(xc, zc).solution, full_matrices=False)
    best = float((zc - (u[:, :3] * s[:3]) @ v[:3]).square().sum())
    assert felt(z - found(x), metric) == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("name", [None, "relu"])
def test_fits_that_are_judged_by_others_keep_what_the_metric_asks_for(name: str | None) -> None:
    (z, y), metric = samples(), metric_of(gram())
    r = None if name is None else activation(name)
    parts = parted(len(y), 300, alike=True)
    found, plain = (unseen(z, y, 4, r, parts=parts, metric=m) for m in (metric, None))
    through = r or torch.Tensor.clone
    assert felt(through(z) - through(found.map(y)), metric) < 0.9 * felt(through(z) - through(plain.map(y)), metric)


@pytest.mark.parametrize("n", [10, 5000, 20_000])
def test_quick_sums_are_those_of_float64_but_for_rounding(n: int) -> None:
    g = torch.Generator().manual_seed(n)
    a, b = (torch.randn(n, width, generator=g) + 1 for width in (7, 5))
    for quick, tolerance in ((True, 3e-6), (False, 1e-14)):
        sums = Products(7, 5, a, quick=quick)
        assert sums.dtype == (torch.float32 if quick else torch.float64)
        for rows in chunks(n, a.device):
            sums.add(a[rows].to(sums.dtype), b[rows].to(sums.dtype))
        total = sums.total()
        assert total.dtype == torch.float64
        assert relative(total, a.double().T @ b.double()) < tolerance
    assert Products(7, 5, a.double(), quick=True).dtype == torch.float64
