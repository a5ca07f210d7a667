"""A slice of ``benchmarks/zoo.py``: twelve families, every check."""

from __future__ import annotations

import pytest
import torchvision

from benchmarks.zoo import EXACT, check
from benchmarks.zoo_models import entries

ENTRIES = {entry.key: entry for entry in entries()}
SLICE = [
    "squeezenet1_1",
    "shufflenet_v2_x0_5",
    "mnasnet0_5",
    "timm:dla46_c",
    "timm:convnext_atto",
    "timm:edgenext_xx_small",
    "timm:efficientvit_b0",
    "timm:ghostnet_050",
    "timm:convit_tiny",  # asks for the device of a weight, the first time it runs
    "timm:naflexvit_base_patch16_gap",
    "timm:regnety_002",
    "timm:starnet_s050",
]


def test_the_zoo_is_complete() -> None:
    names = {entry.name for entry in ENTRIES.values() if entry.library == "torchvision"}
    assert names == set(torchvision.models.list_models(module=torchvision.models))
    assert len({entry.family for entry in ENTRIES.values() if entry.library == "timm"}) >= 60
    assert len({ENTRIES[key].family for key in SLICE}) == 12


@pytest.mark.parametrize("key", SLICE)
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
