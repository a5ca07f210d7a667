"""The z-steps against brute force, and the alternating solver against its own promises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leanconv.solve import ResponseSpace, activation, nonlinear, pca, reduced_rank, spectrum
from leanconv.solve.activations import NAMES, Activation
from leanconv.solve.nonlinear import _advance
from leanconv.solve.reduced_rank import leading_subspace
from leanconv.system.precision import quick_products
from tests.support.activations import PARAMETERS


def make(name: str):
    return activation(name, **PARAMETERS.get(name, {}))


@pytest.mark.parametrize("weight", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_z_step_finds_the_global_minimum(name: str, weight: float) -> None:
    assert_global_minimum(make(name), weight)


def assert_global_minimum(r: Activation, weight: float) -> None:
    """Of the z-step's cost, by brute force."""
    g = torch.Generator().manual_seed(0)
    target = 3 * torch.randn(60, 4, generator=g, dtype=torch.float64)
    v = target + 2 * torch.randn(60, 4, generator=g, dtype=torch.float64)

    def cost(z: Tensor) -> Tensor:
        return (r(target) - r(z)).square() + weight * (z - v).square()

    found = cost(r.z_step(target, r(target), v.clone(), weight))
    best = torch.full_like(found, float("inf"))
    for places in torch.linspace(-25, 25, 20001, dtype=torch.float64).split(500):
        best = torch.minimum(best, cost(places.view(-1, 1, 1).expand(-1, *v.shape)).amin(0))
    assert (found <= best + 1e-4).all(), f"worse by {float((found - best).max())}"


@pytest.mark.parametrize(("beta", "threshold"), [(1.0, 20.0), (3.0, 20.0), (3.0, 0.5)])
def test_softplus_of_any_threshold(beta: float, threshold: float) -> None:
    assert_global_minimum(activation("softplus", beta=beta, threshold=threshold), 0.01)


def test_relu_z_step_is_the_papers_two_candidates() -> None:
    r = activation("relu")
    g = torch.Generator().manual_seed(1)
    target, v = torch.randn(200, 8, generator=g), torch.randn(200, 8, generator=g)
    for weight in (0.01, 1.0):
        wanted = r(target)
        z0 = v.clamp_max(0.0)
        z1 = ((weight * v + wanted) / (weight + 1)).clamp_min(0.0)
        cost0 = wanted.square() + weight * (z0 - v).square()
        cost1 = (wanted - z1).square() + weight * (z1 - v).square()
        expected = torch.where(cost0 <= cost1, z0, z1)
        assert torch.allclose(r.z_step(target, wanted, v.clone(), weight), expected, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_exact_response_is_a_fixed_point(name: str) -> None:
    r = make(name)
    target = torch.linspace(-4, 4, 40).reshape(10, 4)
    z = r.z_step(target, r(target), target.clone(), 0.01)
    assert torch.allclose(z, target, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_match_autograd(name: str) -> None:
    r = make(name)
    if not hasattr(r, "_derivatives"):
        pytest.skip("closed form")
    z = torch.linspace(-4, 4, 101, dtype=torch.float64, requires_grad=True)
    value = r(z)
    (slope,) = torch.autograd.grad(value.sum(), z, create_graph=True)
    found = r._derivatives(z.detach())
    assert torch.allclose(found[0], value.detach(), atol=1e-12)
    assert torch.allclose(found[1], slope.detach(), atol=1e-9)
    away = (z.detach().abs() - 3).abs() > 0.05  # hardswish bends at +-3
    h = 1e-5
    difference = (r._derivatives(z.detach() + h)[1] - r._derivatives(z.detach() - h)[1]) / (2 * h)
    away &= z.detach().abs() > 1e-3
    assert torch.allclose(found[2][away], difference[away], atol=1e-5)


def responses(n: int = 2000, d: int = 24, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=g) * torch.logspace(0, -1, d)
    return (torch.randn(n, d, generator=g) @ mix.T - 0.4).to(dtype)


def true_error(fitted, target: Tensor, y: Tensor, r) -> float:
    return float((r(fitted(y)) - r(target)).double().square().sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_never_worse_than_linear_and_better_where_it_bends(name: str, dtype: torch.dtype) -> None:
    r = activation(name, **({"slope": torch.linspace(0, 0.5, 24)} if name == "prelu" else PARAMETERS.get(name, {})))
    y = responses(n=600, dtype=dtype)
    linear = true_error(pca(y, 6), y, y, r)
    fit = nonlinear(y, y, 6, r)
    assert fit.map.p.dtype == dtype
    assert true_error(fit.map, y, y, r) == pytest.approx(fit.error, rel=1e-3)
    assert fit.error <= linear * (1 + 1e-5)
    if name in ("relu", "silu", "gelu", "gelu_tanh", "hardswish", "hardtanh", "relu6", "mish"):
        assert fit.error < 0.95 * linear


def test_asymmetric_beats_symmetric_when_the_input_is_perturbed() -> None:
    r = activation("relu")
    target = responses()
    g = torch.Generator().manual_seed(7)
    y = target @ (torch.eye(24) + 0.1 * torch.randn(24, 24, generator=g)) + 0.2
    symmetric = nonlinear(target, target, 8, r).map
    asymmetric = nonlinear(target, y, 8, r).map
    assert true_error(asymmetric, target, y, r) < 0.7 * true_error(symmetric, target, y, r)
    assert true_error(asymmetric, target, y, r) < true_error(reduced_rank(target, y, 8), target, y, r)


def test_warm_subspaces_do_as_well_as_exact_eigenvectors(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    r, y = activation("relu"), responses()
    warm = nonlinear(y, y, 6, r, tolerance=None)
    module = sys.modules["leanconv.solve.nonlinear"]
    monkeypatch.setattr(module, "_advance", lambda a, u: leading_subspace(a, u.shape[1]))
    exact = nonlinear(y, y, 6, r, tolerance=None)
    assert warm.iterations == exact.iterations == 50
    assert warm.error == pytest.approx(exact.error, rel=5e-3)


def test_early_stop_is_honest() -> None:
    r, y = activation("relu"), responses()
    full = nonlinear(y, y, 6, r, tolerance=None)
    stopped = nonlinear(y, y, 6, r)
    assert stopped.iterations < full.iterations == 50
    assert stopped.error == min(stopped.errors)
    assert stopped.error <= 1.03 * full.error


def test_full_rank_changes_nothing() -> None:
    r, y = activation("relu"), responses()
    fit = nonlinear(y, y, 24, r)
    assert torch.allclose(fit.map(y), y, atol=1e-4)


def test_singular_covariances_are_solved() -> None:
    r, y = activation("relu"), responses(n=10)
    y[:, 0] = -1.0
    y[:, 1] = y[:, 2]
    for rank in (1, 12, 24):
        fit = nonlinear(y, y, rank, r)
        assert torch.isfinite(fit.map(y)).all()


def test_same_input_same_bits() -> None:
    r, y = activation("relu"), responses()
    a, b = nonlinear(y, y, 6, r), nonlinear(y, y, 6, r)
    assert torch.equal(a.map.p, b.map.p)
    assert torch.equal(a.map.q, b.map.q)
    assert torch.equal(a.map.b, b.map.b)


@pytest.mark.parametrize("rank", [1, 4, 7, 9])
def test_in_the_filters_range_the_answer_is_the_same(rank: int) -> None:
    """24 filters on 9 inputs: responses lie in 9 dimensions. Solving there is solving the whole."""
    generator = torch.Generator().manual_seed(0)
    filters = torch.randn(24, 9, generator=generator, dtype=torch.float64)
    exact = torch.randn(3000, 9, generator=generator, dtype=torch.float64) * torch.logspace(0, -1.5, 9)
    seen = exact + 0.1 * torch.randn(3000, 9, generator=generator, dtype=torch.float64)
    bias = torch.randn(24, generator=generator, dtype=torch.float64)
    target, y = exact @ filters.T + bias, seen @ filters.T + bias
    addend = torch.randn(3000, 24, generator=generator, dtype=torch.float64)
    narrow, relu = ResponseSpace.of(filters), activation("relu")
    assert narrow.basis is not None
    assert torch.allclose(narrow.basis @ (narrow.basis.T @ filters), filters)
    assert torch.allclose(narrow.basis @ narrow.prior @ narrow.basis.T, filters @ filters.T)
    assert torch.allclose(spectrum(y, space=narrow), spectrum(y)[:9])
    wide = ResponseSpace(filters @ filters.T, None)
    pairs = [
        [pca(y, rank, space=space) for space in (wide, narrow)],
        [reduced_rank(target, y, rank, space=space) for space in (wide, narrow)],
        [nonlinear(target, y, rank, relu, addend=addend, space=space, tolerance=None).map for space in (wide, narrow)],
    ]
    for one, other in pairs:
        assert torch.allclose(other(y), one(y), rtol=1e-4, atol=1e-4 * float(y.abs().max()))


def test_a_step_of_orthogonal_iteration_captures_no_less() -> None:
    """Orthonormal columns, and a trace of U^T A A^T U that does not fall, from any start, seen directions or not."""
    torch.manual_seed(5)
    a = torch.randn(40, 40, dtype=torch.float64) * torch.logspace(0, -6, 40, dtype=torch.float64)
    a[:, 25:] = 0  # 15 directions nobody has seen
    for rank in (1, 10, 30):
        u = torch.linalg.qr(torch.randn(40, rank, dtype=torch.float64)).Q
        captured = float((a.T @ u).square().sum())
        for _ in range(5):
            u = _advance(a, u)
            assert (u.T @ u - torch.eye(rank)).abs().max() < 1e-8
            now = float((a.T @ u).square().sum())
            assert now >= captured * (1 - 1e-9)
            captured = now


@pytest.mark.parametrize("rank", [30, 39, 40])
def test_nearly_all_directions_stay_orthonormal(rank: int) -> None:
    """A step brings columns close to the leading direction; with hardly any left out they are nearly dependent."""
    torch.manual_seed(5)
    for _ in range(20):
        a = torch.randn(40, 40, dtype=torch.float64) * torch.logspace(0, -5, 40, dtype=torch.float64)
        u = torch.linalg.qr(torch.randn(40, rank, dtype=torch.float64)).Q
        for _ in range(10):
            u = _advance(a, u)
            assert (u.T @ u - torch.eye(rank)).abs().max() < 1e-8


def test_at_full_rank_the_subspace_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left out: the same map as with exact eigenvectors at every step."""
    import sys

    r, g = activation("relu"), torch.Generator().manual_seed(1)
    spread = torch.logspace(0, -4, 24, dtype=torch.float64)
    mix = torch.linalg.qr(torch.randn(24, 24, generator=g).double()).Q * spread
    target = responses(n=800).double() @ mix
    y = target + 0.1 * torch.randn(800, 24, generator=g).double() @ mix
    fit = nonlinear(target, y, 24, r, tolerance=None)
    module = sys.modules["leanconv.solve.nonlinear"]
    monkeypatch.setattr(module, "_advance", lambda a, u: leading_subspace(a, u.shape[1]))
    exact = nonlinear(target, y, 24, r, tolerance=None)
    assert fit.errors == pytest.approx(exact.errors, rel=1e-6)
    torch.testing.assert_close(fit.map(y), exact.map(y), rtol=1e-6, atol=1e-9)


def test_quick_products_leave_torch_as_it_was() -> None:
    flags = torch.backends.cuda.matmul
    name = "fp32_precision" if hasattr(flags, "fp32_precision") else "allow_tf32"
    before = getattr(flags, name)
    with quick_products(torch.device("cuda")):
        assert getattr(flags, name) in ("tf32", True)
    assert getattr(flags, name) == before
    with quick_products(torch.device("cpu")):
        assert getattr(flags, name) == before
    assert flags.allow_tf32 is False  # the older name is still answered
