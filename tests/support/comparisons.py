"""Saved folders to compare, and invented records of their accuracy and time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import leanconv
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images

QUICK = "--device cpu --quiet"


def evaluation(lost: float, images: int = 200, data: str = "val", **more: Any) -> dict[str, Any]:
    """As ``evaluate --json`` prints it, for an original that is right on 80 %."""
    change = {"original": 0.8, "other": 0.8 - lost, "increase": lost, "low": lost - 0.01, "high": lost + 0.02}
    return {"top1": change, "top5": change, "images": images, "data": data, "agreement": 0.9, "views": 1, **more}


def timing(runtimes: dict[str, tuple[float, float]], threads: int = 1, cpu: str = "a CPU") -> dict[str, Any]:
    """As ``bench --json`` prints it; milliseconds of the original and the other, by runtime."""

    def one(ms: float) -> dict[str, Any]:
        return {"median_ms": ms, "low_ms": 0.9 * ms, "high_ms": 1.1 * ms, "noisy": False}

    return {
        "machine": {"cpu": cpu, "gpu": None, "threads": threads, "torch": "2"},
        "conditions": {"dtype": "float32", "input": "images of 3 x 16 x 16", "device": "cpu"},
        "measurements": [
            {
                "runtime": runtime,
                "batch": 1,
                "networks": {"original": one(before), "folder": one(after)},
                "ratio": {"value": before / after, "low": 0.9 * before / after, "high": 1.1 * before / after},
            }
            for runtime, (before, after) in runtimes.items()
        ],
        "layers": [],
        "notes": [],
    }


@pytest.fixture(scope="module")
def made() -> dict[str, leanconv.Accelerated]:
    network, pictures = plain_network(), smooth_images()
    other = plain_network((16, 24, 24, 24))
    quick: dict[str, Any] = {"samples": 1000, "progress": False}
    return {
        "half": leanconv.accelerate(network, pictures, 2.0, **quick),
        "third": leanconv.accelerate(network, pictures, 3.0, scheme="channel", **quick),
        "another": leanconv.accelerate(other, pictures, 2.0, **quick),
    }


@pytest.fixture
def saved(made: dict[str, leanconv.Accelerated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, result in made.items():
        result.save(name)
    return tmp_path
