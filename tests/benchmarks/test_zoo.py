"""A slice of ``benchmarks/zoo/run.py``: twelve families, every check."""

from __future__ import annotations

import pytest
import torchvision

from benchmarks.zoo.models import SLICE, entries
from benchmarks.zoo.run import EXACT, check

ENTRIES = {entry.key: entry for entry in entries()}


def test_the_zoo_is_complete() -> None:
    names = {entry.name for entry in ENTRIES.values() if entry.library == "torchvision"}
    assert names == set(torchvision.models.list_models(module=torchvision.models))
    assert len({entry.family for entry in ENTRIES.values() if entry.library == "timm"}) >= 60
    assert len({ENTRIES[key].family for key in SLICE}) == 12


QUICK = "shufflenet_v2_x0_5"


@pytest.mark.parametrize("key", [pytest.param(key, marks=[] if key == QUICK else pytest.mark.nightly) for key in SLICE])
def test_every_check_holds(key: str) -> None:
    row = check(ENTRIES[key])
    assert row.error == ""
    assert row.speedup is not None
    assert row.target is not None
    assert row.target <= row.speedup < 1.02 * row.target
    assert row.full_rank_error is not None
    assert row.full_rank_error <= EXACT
    assert row.saved_equal
    assert row.exports
