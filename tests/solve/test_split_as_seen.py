"""Filters split for the patches their layer sees, and for what the output feels of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leanconv.forms.tucker2 import input_basis, input_basis_as_seen
from leanconv.solve import Metric, Moments, SeenBasis, TwoStep, spatial_als, spatial_basis, spatial_basis_as_seen, swept
from leanconv.solve.spatial_svd import WHITE
from tests.support.equality import relative


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariance(size: int, seed: int) -> Tensor:
    """With a mean variance of 1, falling over two decades."""
    root = numbers(size, size, seed=seed) * torch.logspace(0, -1, size, dtype=torch.float64)
    found = root @ root.T
    return found / found.diagonal().mean()


def product_patches(columns: Tensor, together: Tensor) -> Tensor:
    """Patches whose scatter is exactly 2 ``columns`` (x) ``together``, and whose mean is ``offset``."""
    left, right = torch.linalg.cholesky(columns), torch.linalg.cholesky(together)
    half = torch.einsum("ai,bj->ijab", left, right).flatten(2).flatten(0, 1)
    return torch.cat([half, -half]) + numbers(half.shape[1], seed=9)


def noisy(covariance: Tensor) -> Tensor:
    """With the white noise that is beside what was seen."""
    size = len(covariance)
    return covariance + WHITE * covariance.diagonal().mean() * torch.eye(size, dtype=torch.float64)


def error(weight: Tensor, split: TwoStep, scatter: Tensor, metric: Metric | None = None) -> float:
    """Of the responses to patches of this ``scatter``."""
    apart = (weight - split.product()).flatten(1)
    apart = apart if metric is None else metric.root @ apart
    return float((apart @ scatter * apart).sum())


def metric_of(d: int) -> Metric:
    found = Metric.of(covariance(d, 5))
    assert found is not None
    return found


def seen(weight: Tensor, patches: Tensor, metric: Metric | None = None) -> SeenBasis:
    found = spatial_basis_as_seen(weight, patches, metric)
    assert found is not None
    return found


@pytest.mark.parametrize("felt", [False, True])
@pytest.mark.parametrize(("kernel", "rank"), [((3, 3), 1), ((3, 3), 4), ((2, 5), 3), ((5, 2), 7)])
def test_of_patches_with_a_product_for_a_scatter_no_split_loses_less(
    kernel: tuple[int, int], rank: int, felt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the filters alone either, nor halves fitted in turns, from anywhere: these come near."""
    d, c, (kh, kw) = 10, 4, kernel
    weight, columns, together = numbers(d, c, kh, kw), covariance(c * kh, 1), covariance(kw, 2)
    metric = metric_of(d) if felt else None
    scatter = torch.kron(noisy(columns), noisy(together))
    basis = seen(weight, product_patches(columns, together), metric)
    best = error(weight, basis.split(rank), scatter, metric)
    assert best == pytest.approx(float(basis.values[rank:].sum()) / (2 * kw), rel=1e-9)
    filters = error(weight, spatial_basis(weight).split(rank), scatter, metric)
    assert best < 0.9 * filters
    monkeypatch.setattr(spatial_als, "WHITE", 0.0)
    mean = torch.zeros(len(scatter), dtype=torch.float64)
    root = torch.eye(d, dtype=torch.float64) if metric is None else metric.root
    turned = (root @ weight.flatten(1)).reshape_as(weight)  # in these coordinates an error is a length
    errors = []
    for start in range(3):
        begin = spatial_basis(turned if start == 0 else numbers(d, c, kh, kw, seed=20 + start)).split(rank)
        errors.append(error(turned, swept(begin, turned, Moments(1, mean, scatter.clone()), 60), scatter))
    assert min(errors) > best * (1 - 1e-9)
    assert min(errors) < 1.05 * best


def test_a_metric_gives_up_what_is_not_felt() -> None:
    weight, patches, metric = numbers(10, 4, 3, 3), product_patches(covariance(12, 1), covariance(3, 2)), metric_of(10)
    scatter = torch.kron(noisy(covariance(12, 1)), noisy(covariance(3, 2)))
    with_it, without = seen(weight, patches, metric).split(4), seen(weight, patches).split(4)
    assert error(weight, with_it, scatter, metric) < 0.95 * error(weight, without, scatter, metric)
    assert error(weight, with_it, scatter) > error(weight, without, scatter)


@pytest.mark.parametrize("rank", [1, 5, 9])
def test_of_white_patches_it_is_the_split_of_the_filters(rank: int) -> None:
    weight = numbers(10, 4, 3, 3)
    patches = product_patches(torch.eye(12, dtype=torch.float64), torch.eye(3, dtype=torch.float64))
    wanted = spatial_basis(weight).split(rank).product()
    assert relative(seen(weight, patches).split(rank).product(), wanted) < 1e-9


@pytest.mark.parametrize("felt", [False, True])
@pytest.mark.parametrize("shape", [(10, 4, 3, 3), (2, 8, 3, 3), (30, 2, 2, 5)])
def test_full_rank_is_the_filters(shape: tuple[int, ...], felt: bool) -> None:
    weight, patches = numbers(*shape), numbers(50, shape[1] * shape[2] * shape[3], seed=1)
    basis = seen(weight, patches, metric_of(shape[0]) if felt else None)
    full = min(shape[1] * shape[2], shape[0] * shape[3])
    assert len(basis.values) == full
    assert bool((basis.values.diff() <= 1e-9 * basis.values[0]).all())
    assert relative(basis.split(full).product(), weight) < 1e-9


def test_patches_that_never_vary_show_nothing() -> None:
    assert spatial_basis_as_seen(numbers(10, 4, 3, 3), torch.ones(40, 36, dtype=torch.float64)) is None
    assert input_basis_as_seen(numbers(10, 4, 3, 3), torch.ones(40, 36, dtype=torch.float64)) is None


def test_few_patches_and_dead_filters() -> None:
    weight = numbers(10, 4, 3, 3)
    weight[3:] = 0
    split = seen(weight, numbers(3, 36)).split(8)
    assert split.product().isfinite().all()
    assert float(split.product()[3:].norm()) < 1e-9 * float(weight.norm())


def test_both_factors_have_the_same_size_and_the_filters_dtype() -> None:
    weight = numbers(10, 4, 3, 3).float()
    split = seen(weight, 1000 * numbers(500, 36).float()).split(6)
    assert split.first.dtype == split.second.dtype == torch.float32
    sizes = split.first.flatten(1).norm(dim=1), split.second.transpose(0, 1).flatten(1).norm(dim=1)
    torch.testing.assert_close(*sizes)


@pytest.mark.parametrize("felt", [False, True])
@pytest.mark.parametrize("kernel", [(3,), (3, 3), (2, 3, 2)])
def test_tucker2s_first_factor_is_for_what_is_seen_of_the_channels(kernel: tuple[int, ...], felt: bool) -> None:
    d, c, rank = 10, 6, 2
    weight, k = numbers(d, c, *kernel), torch.Size(kernel).numel()
    columns, together, metric = covariance(c, 1), covariance(k, 2), metric_of(d) if felt else None
    basis = input_basis_as_seen(weight, product_patches(columns, together), metric)
    assert basis is not None
    scatter = torch.kron(noisy(columns), noisy(together))
    best, filters = (error(weight, one.split(rank), scatter, metric) for one in (basis, input_basis(weight)))
    assert best == pytest.approx(float(basis.values[rank:].sum()) / (2 * k), rel=1e-9)
    assert best < 0.95 * filters
    split = basis.split(rank)
    assert split.first.shape == (rank, c, *[1] * len(kernel))
    assert split.second.shape == (d, rank, *kernel)
    assert len(basis.values) == min(c, d * k)
    assert relative(basis.split(c).product(), weight) < 1e-9
