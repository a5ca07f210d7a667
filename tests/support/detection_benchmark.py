"""The detection benchmark on a few small pictures."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks.detection import run as detection
from benchmarks.detection import table as detection_table
from benchmarks.detection import training as detection_training
from leanconv.images.detection_data import Scenes, find_scenes
from tests.support.networks import small_features

SMALL = ["--size", "64", "--width", "16", "--epochs", "1", "--batch", "2", "--device", "cpu"]


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def write_shard(path: Path, count: int, seed: int) -> None:
    """Dark pictures, wide and tall, with a red or blue rectangle in each but the last; one is marked difficult."""
    random = np.random.default_rng(seed)
    with tarfile.open(path, "w") as tar:
        for number in range(count):
            width, height = [(64, 48), (40, 64)][number % 2]
            pixels = random.integers(0, 60, (height, width, 3), dtype=np.uint8)
            left, top = int(random.integers(2, 10)), int(random.integers(2, 10))
            box = [left, top, left + 24, top + 28]
            objects = [{"label": ["boat", "car"][number % 2], "box": box, "difficult": number == 1}]
            if number == count - 1:
                objects = []
            else:
                pixels[top : top + 28, left : left + 24, 2 * (number % 2)] = 250
            about = {"width": width, "height": height, "objects": objects}
            encoded = io.BytesIO()
            Image.fromarray(pixels).save(encoded, "PNG")
            add(tar, f"{seed}-{number}.png", encoded.getvalue())
            add(tar, f"{seed}-{number}.json", json.dumps(about).encode())


class Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = small_features()
        self.head = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """VOC in small; the network in place of VGG-16, whose weights are those of its seed."""
    write_shard(tmp_path / "train-0.tar", 6, seed=1)
    write_shard(tmp_path / "val-0.tar", 6, seed=2)
    (tmp_path / "classes.json").write_text('["boat", "car"]')
    monkeypatch.setattr(detection_training, "original", lambda weights: Probe().eval())
    monkeypatch.setattr(detection_table, "original", lambda weights: Probe().eval())
    monkeypatch.setattr(detection, "original", lambda weights: Probe().eval())
    return tmp_path


def given(folder: Path, *more: str) -> list[str]:
    calibration = str(folder / "train-0.tar")
    return [
        "--data",
        str(folder),
        "--weights",
        "none",
        "--calibration",
        calibration,
        "--refine",
        "closed-form",
        *SMALL,
        *more,
    ]


def small_scenes(folder: Path) -> Scenes:
    return find_scenes(folder, split="train")


def small_detector() -> nn.Module:
    torch.manual_seed(0)
    return detection_training.build(("boat", "car"), small_features(), size=64, width=16, frozen=0)
