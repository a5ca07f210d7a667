"""The learning curve of a fit: how many samples it needs, by its error on images it has not seen."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from leanconv.solve import Enough, Regression, ResponseSpace, enough, parted, reduced_rank, thinned
from tests.support.equality import relative

module = importlib.import_module("leanconv.solve.sample_size")  # the package has a function of its name


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def squared(a: Tensor) -> float:
    return float(a.square().sum())


def mixed(n: int, p: int, seed: int = 0) -> Tensor:
    """Correlated columns, with a mean."""
    return numbers(n, p, seed=seed) @ numbers(p, p, seed=seed + 1) + numbers(p, seed=seed + 2)


def case(kind: str, n: int = 3840) -> tuple[Regression, Tensor]:
    """What is fitted, and from which columns in the end."""
    if kind == "in a space":  # 5 inputs for 8 filters
        filters = numbers(8, 5, seed=7)
        y, space = mixed(n, 5) @ filters.T, ResponseSpace.of(filters)
    elif kind == "halfway":  # 8 filters see 12 numbers
        before, filters, x = numbers(4, 5, seed=6), numbers(8, 4, 1, 3, seed=7), mixed(n, 12)
        y, space = x @ filters.flatten(1).T, ResponseSpace.behind(x, filters, before)
    else:
        y = mixed(n, 8)
        space = ResponseSpace.anywhere(y)
    if kind == "symmetric":
        return Regression(y, y, space), y
    z = y @ numbers(8, 8, seed=4) + 3 * numbers(n, 8, seed=5)
    if space.inputs is not None:
        z = z + space.inputs @ numbers(12, 8, seed=8)  # what no mixture of the 8 filters gives
    return Regression(z, y, space), y if space.inputs is None else space.inputs


def by_the_book(x: Tensor, z: Tensor, rank: int, fitted: Tensor, held: Tensor, *, symmetric: bool) -> float:
    """The relative error on rows held out: regress, then keep the leading directions of what was fitted."""
    x_mean, z_mean = x[fitted].mean(0), z[fitted].mean(0)
    centred, wanted = x[fitted] - x_mean, z[fitted] - z_mean
    whole = torch.eye(x.shape[1]).double()
    if not symmetric:
        whole = torch.linalg.lstsq(centred, wanted, driver="gelsd").solution
    right = torch.linalg.svd(centred @ whole, full_matrices=False).Vh[:rank]
    found = (x[held] - x_mean) @ whole @ right.T @ right + z_mean
    return relative(found, z[held])


@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("kind", ["anywhere", "symmetric", "in a space", "halfway"])
def test_the_curve_is_that_of_plain_regressions(kind: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOLERANCE", -1.0)  # it does not end early
    if kind == "in a space":
        rank = min(rank, 5)
    one, x = case(kind)
    found = enough([one], rank, parted(len(one.y), 40, alike=True))
    assert found is not None
    fitted, held = parted(len(one.y), 40, alike=True)
    order = module._drawn(len(fitted))
    if kind == "symmetric" and rank == 8:
        assert all(error < 1e-6 for _, error in found.curve)
        return
    assert [rows for rows, _ in found.curve] == [len(fitted) // 8, len(fitted) // 4, len(fitted) // 2, len(fitted)]
    for step, (_, error) in zip((1, 2, 4, 8), found.curve, strict=True):
        rows = fitted[order < step]
        plain = by_the_book(x, one.z, rank, rows, held, symmetric=kind == "symmetric")
        assert error == pytest.approx(plain, rel=2e-4)  # pseudo-samples make a difference
        space = one.space if one.space.inputs is None else replace(one.space, inputs=x[rows])
        y = one.y[rows]
        usual = reduced_rank(y if one.z is one.y else one.z[rows], y, rank, space=space)
        assert error == pytest.approx(relative(usual(x[held]), one.z[held]), rel=1e-8)


def test_squared_errors_of_groups_add_up() -> None:
    a, b = case("anywhere")[0], case("in a space")[0]
    parts = parted(3840, 40, alike=True)
    alone = [enough([one], 3, parts) for one in (a, b)]
    both = enough([a, b], 3, parts)
    assert both is not None
    held = parted(3840, 40, alike=True)[1]
    sizes = [squared(one.z[held]) for one in (a, b)]
    apart = sum(size * found.curve[0][1] ** 2 for size, found in zip(sizes, alone, strict=True) if found)
    assert both.curve[0][1] ** 2 * sum(sizes) == pytest.approx(apart)


@cache
def needed(p: int, noise: float, *, n: int = 16_000, rank: int = 4) -> Enough:
    """8 responses from p inputs and noise, of which a fit of rank 4 cannot have all."""
    x, filters = numbers(n, p, seed=p).float(), numbers(8, p, seed=1).float() / p**0.5
    clean = x @ filters.T
    space = ResponseSpace(torch.eye(p, dtype=torch.float64), filters.double(), x)
    wanted = clean + noise * numbers(n, 8, seed=2).float()
    found = enough([Regression(wanted, clean, space)], rank, parted(n, 80, alike=True))
    assert found is not None
    return found


def test_more_unknowns_need_more_samples() -> None:
    found = [needed(p, 2.0) for p in (8, 200, 400, 800)]
    assert [a.rows < b.rows for a, b in pairwise(found)] == [True] * 3
    assert found[0].rows == 2000
    assert [one.enough for one in found] == [True, True, True, False]
    assert found[-1].rows == 16_000


def test_more_noise_needs_more_samples() -> None:
    rows = [needed(300, noise).rows for noise in (0.1, 0.3, 2.0)]
    assert rows[0] < rows[1] < rows[2]


def test_the_size_chosen_is_the_first_that_doubling_hardly_helps() -> None:
    for p in (8, 200, 800):
        found = needed(p, 2.0)
        falls = [1 - after / before for (_, before), (_, after) in pairwise(found.curve)]
        assert all(fall >= module.TOLERANCE for fall in falls[:-1])
        assert (falls[-1] < module.TOLERANCE) == found.enough
        assert found.rows == (16_000 * 2 ** (len(falls) - 1) // 8 if found.enough else 16_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("symmetric", [True, False])
def test_responses_in_few_dimensions_need_few_samples(dtype: torch.dtype, symmetric: bool) -> None:
    y = (numbers(40_000, 3) @ numbers(3, 64, seed=1) + 1).to(dtype)
    z = y if symmetric else (y @ numbers(64, 64, seed=2).to(dtype)) / 8
    found = enough([Regression(z, y, ResponseSpace.anywhere(y))], 4, parted(len(y), 100, alike=True))
    assert found is not None
    assert found.rows == 5000
    assert found.enough
    assert found.curve[0][1] < 1e-3


def test_dead_layers_need_few_samples() -> None:
    y = torch.zeros(20_000, 4)
    found = enough([Regression(y, y, ResponseSpace.anywhere(y))], 2, parted(len(y), 100, alike=True))
    assert found is not None
    assert (found.rows, found.enough) == (2500, True)


@pytest.mark.parametrize("images", [8, 40, 83, 1000])
@pytest.mark.parametrize("each", [1, 9, 50])
def test_rows_held_out_are_of_other_images(images: int, each: int) -> None:
    fitted, held = (rows // each for rows in parted(images * each, images, alike=True))
    assert not set(fitted.tolist()) & set(held.tolist())
    assert len(fitted) + len(held) == images * each
    assert len(set(held.tolist())) == -(-images // 8)
    # And they are spread over all.
    assert all((held // 8 == part).any() for part in range(images // each // 8))


@pytest.mark.parametrize("images", [8, 40, 300])
@pytest.mark.parametrize("seed", range(5))
def test_so_they_are_where_images_have_more_and_fewer_rows(images: int, seed: int) -> None:
    sizes = torch.randint(20, 41, (images,), generator=torch.Generator().manual_seed(seed))
    image = torch.arange(images).repeat_interleave(sizes)
    fitted, held = parted(len(image), images, alike=False)
    assert not set(image[fitted].tolist()) & set(image[held].tolist())
    assert len(held) > 0.07 * len(image)
    assert len(fitted) > 0.3 * len(image)


def test_thinning_favours_no_column_of_a_map() -> None:
    rows = thinned(100 * 16 * 16, 100 * 16 * 4)
    assert len(rows) == 6400
    assert (rows // 4).tolist() == list(range(6400))  # one of each four
    columns = torch.bincount(rows % 16, minlength=16)
    assert columns.min() > 300  # 400 each, where every fourth row would be 1600 in four columns
    assert torch.equal(thinned(100, 100), torch.arange(100))
    assert torch.equal(thinned(1000, 300), thinned(1000, 300))


def test_with_few_rows_or_images_all_are_taken() -> None:
    y = mixed(4000, 4)
    few = Regression(y[:1999], y[:1999], ResponseSpace.anywhere(y))
    assert enough([few], 2, parted(len(few.y), 40, alike=True)) is None
    assert parted(len(y), 7, alike=True) is None
