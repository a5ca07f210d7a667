"""PCA, reduced-rank regression and the spatial split: facts of linear algebra."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leanconv.solve import pca, reduced_rank, spatial_basis, spectrum

DTYPES = [torch.float32, torch.float64]


def samples(n: int = 400, d: int = 20, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Correlated responses with a mean, eigenvalues falling over three decades."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=g, dtype=torch.float64) * torch.logspace(0, -1.5, d, dtype=torch.float64)
    return (torch.randn(n, d, generator=g, dtype=torch.float64) @ mix.T + 0.5).to(dtype)


def squared(a: Tensor, b: Tensor) -> float:
    return float((a - b).double().square().sum())


@pytest.mark.parametrize("dtype", DTYPES)
def test_pca_error_is_the_energy_left_out(dtype: torch.dtype) -> None:
    y = samples(dtype=dtype)
    values = spectrum(y)
    for rank in (1, 7, 19):
        error = squared(pca(y, rank)(y), y)
        assert error == pytest.approx(float(values[rank:].sum()) * len(y), rel=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("solver", [pca, lambda y, rank: reduced_rank(y, y, rank)])
def test_full_rank_is_the_identity(dtype: torch.dtype, solver) -> None:
    y = samples(dtype=dtype)
    fitted = solver(y, y.shape[1])
    assert fitted.p.dtype == fitted.q.dtype == fitted.b.dtype == dtype
    assert (fitted(y) - y).norm() / y.norm() < 100 * torch.finfo(dtype).eps


def test_reduced_rank_of_itself_is_pca() -> None:
    y = samples()
    a, b = pca(y, 6), reduced_rank(y, y, 6)
    assert torch.allclose(a(y), b(y), atol=1e-5)


def test_reduced_rank_beats_every_competitor() -> None:
    """Against truncated least squares, PCA of the target and alternating least squares from random starts."""
    y = samples(n=20_000)
    z = y @ torch.randn(20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + samples(
        n=20_000, seed=2
    )
    rank = 5
    found = squared(reduced_rank(z, y, rank)(y), z)
    yc, zc = y - y.mean(0), z - z.mean(0)
    least_squares = torch.linalg.lstsq(yc, zc).solution.T
    u, s, v = torch.linalg.svd(least_squares)
    truncated = (u[:, :rank] * s[:rank]) @ v[:rank]
    assert found < squared(yc @ truncated.T, zc)
    for seed in range(3):
        q = torch.randn(20, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for _ in range(60):
            p = torch.linalg.lstsq(yc @ q, zc).solution.T
            q = torch.linalg.lstsq(yc, zc @ torch.linalg.pinv(p).T).solution
        assert found <= squared(yc @ q @ p.T, zc) * (1 + 1e-5)


def test_reduced_rank_equals_the_generalised_svd() -> None:
    """method.md: M^ = U S V^T with U^T U = I and V^T (Y Y^T) V = I, truncated."""
    y = samples(n=20_000)
    z = torch.tanh(y) + 0.1 * samples(n=20_000, seed=3)
    yc, zc = (y - y.mean(0)).T, (z - z.mean(0)).T
    gram = yc @ yc.T
    values, vectors = torch.linalg.eigh(gram)
    root = (vectors * values.sqrt()) @ vectors.T
    estimate = zc @ yc.T @ torch.linalg.inv(gram)
    u, s, w = torch.linalg.svd(estimate @ root)
    expected = (u[:, :6] * s[:6]) @ w[:6] @ torch.linalg.inv(root)
    found = reduced_rank(z, y, 6)(y)
    assert torch.allclose(found, (expected @ yc).T + z.mean(0), atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dead_and_duplicate_filters_and_few_samples_are_solved(dtype: torch.dtype) -> None:
    y = samples(dtype=dtype)
    y[:, 3] = 0.0
    y[:, 4] = 1.5
    y[:, 5] = y[:, 6]
    few = y[:7]
    for data in (y, few, few[:1]):
        for rank in (1, 5, 20):
            for fitted in (pca(data, rank), reduced_rank(data, data, rank)):
                assert torch.isfinite(fitted(data)).all()
    # At full rank a direction nobody has seen passes unchanged instead of being projected out.
    fresh = samples(seed=9, dtype=dtype)
    assert torch.allclose(reduced_rank(few, few, 20)(fresh), fresh, atol=1e-3)


def test_solutions_do_not_depend_on_the_order_of_samples() -> None:
    y = samples()
    z = y + 0.1 * samples(seed=5)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    a, b = reduced_rank(z, y, 4), reduced_rank(z[order], y[order], 4)
    assert torch.allclose(a(y), b(y), atol=1e-8)


@pytest.mark.parametrize("shape", [(8, 5, 3, 3), (5, 16, 3, 3), (6, 4, 5, 3), (4, 6, 2, 7)])
def test_spatial_split(shape: tuple[int, int, int, int]) -> None:
    weight = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    d, c, kh, kw = shape
    basis = spatial_basis(weight)
    limit = min(c * kh, d * kw)
    singular = torch.linalg.svdvals(weight.permute(1, 2, 0, 3).reshape(c * kh, d * kw))
    assert torch.allclose(basis.values[:limit].sqrt(), singular, atol=1e-8)
    assert torch.allclose(basis.split(limit).product(), weight, atol=1e-10)
    for rank in (1, limit // 2):
        factors = basis.split(rank)
        assert factors.first.shape == (rank, c, kh, 1)
        assert factors.second.shape == (d, rank, 1, kw)
        # Eckart-Young: no pair of this rank is closer to the filters.
        assert squared(factors.product(), weight) == pytest.approx(float(singular[rank:].square().sum()))


def test_spatial_split_of_separable_filters_needs_rank_one() -> None:
    column, row = torch.randn(1, 4, 3, 1), torch.randn(6, 1, 1, 3)
    weight = column * row
    assert torch.allclose(spatial_basis(weight).split(1).product(), weight, atol=1e-6)


def test_spatial_split_of_zero_filters() -> None:
    factors = spatial_basis(torch.zeros(4, 3, 3, 3)).split(2)
    assert torch.equal(factors.product(), torch.zeros(4, 3, 3, 3))
