"""The error a fit reports."""

from __future__ import annotations

import math

import pytest
import torch

from leanconv.calibrate.probes import Responses
from leanconv.forms.fit import measure
from leanconv.network.sites import Site
from leanconv.network.survey import survey
from leanconv.solve import moments
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images


@pytest.fixture(scope="module")
def site() -> Site:
    found = survey(plain_network(), smooth_images(1)).sites[0]
    assert found.activation.name == "relu"
    return found


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("adds", [False, True])
def test_the_error_is_the_same_however_many_rows_are_looked_at_together(
    site: Site, rows: int, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "CPU_ROWS", rows)
    torch.manual_seed(0)
    target, given = (Responses(torch.randn(20, 6), torch.randn(20, 6) if adds else None) for _ in range(2))

    def fitted(y: torch.Tensor) -> torch.Tensor:
        return 0.5 * y + 0.1

    def whole(y: torch.Tensor, responses: Responses) -> torch.Tensor:
        return (y if responses.addend is None else y + responses.addend).relu()

    wanted = whole(target.y, target)
    apart = whole(fitted(given.y), given) - wanted
    assert measure(site, target, given, fitted) == pytest.approx(float(apart.norm() / wanted.norm()), rel=1e-5)
    plain = whole(given.y, given) - wanted
    assert measure(site, target, given) == pytest.approx(float(plain.norm() / wanted.norm()), rel=1e-5)


def test_nothing_approximated_by_nothing_is_no_error(site: Site) -> None:
    nothing, something = Responses(-torch.ones(4, 6)), Responses(torch.ones(4, 6))
    assert measure(site, nothing, nothing) == 0.0
    assert measure(site, nothing, something) == math.inf
    assert measure(site, something, something) == 0.0
