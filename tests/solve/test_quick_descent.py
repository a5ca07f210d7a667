"""Fewer iterations by momentum, and quicker ones in bfloat16: neither moves the error."""

from __future__ import annotations

import importlib

import pytest
import torch

from leanconv.solve import ResponseSpace, activation, nonlinear_holdout, parted, unseen
from leanconv.solve.moments import Sums
from leanconv.solve.nonlinear import Descent
from leanconv.solve.nonlinear_holdout import HEAT, ITERATIONS, PATIENCE, TOLERANCE, WEIGHT
from leanconv.solve.reduced_rank import Regressor
from leanconv.system.precision import multiplies_bfloat16
from tests.support.deep_responses import error, layer

relu = activation("relu")
nonlinear_module = importlib.import_module("leanconv.solve.nonlinear")  # the room has a function of its name
HAS_BFLOAT16 = multiplies_bfloat16(torch.ones(1))


def errors(images: int, rank: int, steps: int, *, quick: bool, dtype: torch.dtype = torch.float64) -> list[float]:
    """On rows of other images, of the linear start and after each of so many ``steps``."""
    target, y = (part.to(dtype) for part in layer(images))
    fitted, held = parted(len(y), images, alike=True)
    sums = Sums.of(target[fitted], y[fitted], y[fitted])
    regressor = Regressor.with_moments(sums.moments, y[fitted], ResponseSpace.anywhere(y))
    descent = Descent(target[fitted], y[fitted], rank, relu, regressor, sums, addend=None, quick=quick)
    found = [error(descent.current, target[held], y[held])]
    for _ in range(steps):
        descent.sweep(WEIGHT, measure=False)
        descent.advance()
        found.append(error(descent.current, target[held], y[held]))
    return found


@pytest.mark.parametrize(("images", "rank"), [(64, 6), (256, 3), (256, 12)])
def test_with_momentum_about_half_as_many_iterations_do(images: int, rank: int) -> None:
    plain, quick = (errors(images, rank, 40, quick=quick) for quick in (False, True))
    assert quick[0] == plain[0]
    for steps, enough in ((10, 7), (20, 10), (40, 16)):
        assert min(quick[: enough + 1]) <= 1.003 * min(plain[: steps + 1])


@pytest.mark.parametrize("steps", [1, 2])
def test_the_first_steps_have_nothing_to_go_on_from(steps: int) -> None:
    """The first moves nothing; the second has seen one move."""
    plain, quick = (errors(64, 6, steps, quick=quick) for quick in (False, True))
    assert quick[1] == plain[1]
    assert (quick == plain) == (steps == 1)


@pytest.mark.skipif(not HAS_BFLOAT16, reason="no instructions for bfloat16 products")
@pytest.mark.parametrize(("images", "rank"), [(64, 6), (256, 12)])
def test_products_in_bfloat16_do_not_move_the_error(images: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    half = errors(images, rank, 20, quick=True, dtype=torch.float32)
    monkeypatch.setattr(nonlinear_module, "multiplies_bfloat16", lambda _: False)
    full = errors(images, rank, 20, quick=True, dtype=torch.float32)
    assert half != full  # else they were not in bfloat16
    assert half == pytest.approx(full, rel=3e-3)


@pytest.mark.skipif(not HAS_BFLOAT16, reason="no instructions for bfloat16 products")
def test_a_fit_in_bfloat16_is_as_good_on_rows_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    target, y = (part.float() for part in layer(256))
    parts = parted(len(y), 256, alike=True)
    half = unseen(target, y, 8, relu, parts=parts)
    monkeypatch.setattr(nonlinear_module, "multiplies_bfloat16", lambda _: False)
    full = unseen(target, y, 8, relu, parts=parts)
    assert min(half.errors) == pytest.approx(min(full.errors), rel=3e-3)


def test_only_float32_on_a_cpu_is_multiplied_in_bfloat16() -> None:
    assert not multiplies_bfloat16(torch.ones(1, dtype=torch.float64))
    assert not multiplies_bfloat16(torch.ones(1, device="meta"))


def test_a_trial_ends_when_the_error_no_longer_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """By less than TOLERANCE in PATIENCE iterations; and no weight of pseudo-samples gets fewer than HEAT."""
    target, y = layer(64)
    parts = parted(len(y), 64, alike=True)
    found = unseen(target, y, 6, relu, parts=parts).errors
    assert HEAT <= len(found) - 1 < ITERATIONS
    falls = [1 - after / before for before, after in zip(found, found[PATIENCE:], strict=False)]
    assert falls[-2] <= TOLERANCE  # an error is known one iteration later, so that a GPU never waits
    assert all(fall > TOLERANCE for fall in falls[max(0, HEAT - PATIENCE) : -2])
    monkeypatch.setattr(nonlinear_holdout, "TOLERANCE", -1.0)
    assert len(unseen(target, y, 6, relu, parts=parts).errors) == ITERATIONS + 1
