"""Arguments of earlier releases: each still works, says what to write in its place, and gives the same network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import leanconv
from leanconv.api import OLD
from leanconv.ranks.latency import layer_times, selector
from tests.support.equality import assert_equal
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images

IMAGES = smooth_images(16)
TARGET = leanconv.Target(device="cpu", batch=2)
SPELLINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"refine": "distill", "steps": 2}, {"refine": leanconv.Distill(steps=2)}),
    ({"sweeps": 2}, {"scheme": leanconv.ThreeD(sweeps=2)}),
    ({"scheme": "3d", "sweeps": 0}, {"scheme": leanconv.ThreeD()}),
    # In so much time all layers stay as they are, whatever the clock says.
    ({"ranks": "latency", "latency": 1e6}, {"ranks": leanconv.Latency(ms=1e6)}),
    (
        {"ranks": "latency", "latency": 1e6, "target": TARGET.to_json()},
        {"ranks": leanconv.Latency(ms=1e6, target=TARGET)},
    ),
    ({"kernels": "auto"}, {}),
]


@pytest.fixture(autouse=True)
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are taken in a moment, and kept in a folder of the test."""
    monkeypatch.setenv("LEANCONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(layer_times, "SECONDS", 0.0)
    monkeypatch.setattr(selector, "SECONDS", 0.01)
    monkeypatch.setattr("leanconv.ranks.latency.choose.sizes", lambda limit: [r for r in (4, 8, 16) if r <= limit])


def run(**arguments: Any) -> leanconv.Accelerated:
    return leanconv.accelerate(plain_network(), IMAGES, 2, samples=500, progress=False, **arguments)


@pytest.mark.parametrize(("old", "new"), SPELLINGS, ids=[" ".join(old) for old, _ in SPELLINGS])
def test_an_old_spelling_works_and_names_the_new_one(old: dict[str, Any], new: dict[str, Any]) -> None:
    with pytest.warns(FutureWarning) as warned:
        before = run(**old)
    said = [str(one.message) for one in warned if "is going" in str(one.message)]
    assert said == [f"{name}= is going; write {OLD[name]} instead." for name in old if name in OLD]
    assert said
    assert all(one.filename == __file__ for one in warned if "is going" in str(one.message))
    after = run(**new)
    assert before.options == after.options
    assert_equal(before, after)


def test_every_old_spelling_is_tried() -> None:
    assert {name for old, _ in SPELLINGS for name in old} >= set(OLD)


def test_the_new_spellings_warn_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    for _, new in SPELLINGS[:2]:
        run(**new)
    assert not [one for one in recwarn if issubclass(one.category, FutureWarning) and "leanconv" in str(one.message)]


def test_what_never_was_an_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"accelerate\(\) got an unexpected keyword argument 'speed'"):
        leanconv.accelerate(plain_network(), torch.rand(1, 3, 8, 8), speed=2)
