"""Pictures with marked objects in every format, and a detector that finds coloured rectangles."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tests.support.pictures import encoded, pack

# Pictures of 30 x 24: class, box in pixels from 0 to the width, difficult. The last has nothing in it.
Marks = list[tuple[str, tuple[float, float, float, float], bool]]


TRUTH: dict[str, Marks] = {
    "a": [("dog", (0, 0, 10, 12), False), ("cat", (5, 6, 30, 24), True)],
    "b": [("cat", (1, 2, 3, 4), False)],
    "c": [],
}


def write_voc(root: Path, truth: dict[str, Marks] = TRUTH, split: str = "val") -> Path:
    folder = root / "VOC2012"
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number, (name, marks) in enumerate(truth.items()):
        (folder / "JPEGImages" / f"{name}.jpg").write_bytes(encoded(seed=number, form="JPEG"))
        objects = "".join(
            f"<object><name>{kind}</name><difficult>{int(difficult)}</difficult><bndbox><xmin>{box[0] + 1}</xmin>"
            f"<ymin>{box[1] + 1}</ymin><xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox>"
            "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part></object>"
            for kind, box, difficult in marks
        )
        text = f"<annotation><size><width>30</width><height>24</height></size>{objects}</annotation>"
        (folder / "Annotations" / f"{name}.xml").write_text(text)
    (folder / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(truth) + "\n")
    return folder


def coco(truth: dict[str, Marks] = TRUTH) -> dict:
    """Category ids with gaps, not in order of name or place."""
    ids = {"dog": 7, "cat": 3}
    marks = [(number, mark) for number, name in enumerate(truth) for mark in truth[name]]
    return {
        "images": [{"id": i, "file_name": f"{name}.jpg", "width": 30, "height": 24} for i, name in enumerate(truth)],
        "categories": [{"id": number, "name": name} for name, number in ids.items()],
        "annotations": [
            {
                "image_id": image,
                "category_id": ids[kind],
                "bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]],
                "iscrowd": int(difficult),
            }
            for image, (kind, box, difficult) in marks
        ],
    }


def write_coco(root: Path, truth: dict[str, Marks] = TRUTH) -> Path:
    for number, name in enumerate(truth):
        (root / f"{name}.jpg").write_bytes(encoded(seed=number, form="JPEG"))
    (root / "marks.json").write_text(json.dumps(coco(truth)))
    return root / "marks.json"


def pairs(truth: dict[str, Marks] = TRUTH, numbers: list[str] | None = None) -> dict[str, bytes]:
    """Members of a shard; labels are names, or where in ``numbers`` they are."""
    members = {}
    for number, (name, marks) in enumerate(truth.items()):
        objects = [
            {"label": numbers.index(kind) if numbers else kind, "box": list(box), "difficult": int(difficult)}
            for kind, box, difficult in marks
        ]
        members[f"{name}.jpg"] = encoded(seed=number, form="JPEG")
        members[f"{name}.json"] = json.dumps({"width": 30, "height": 24, "objects": objects}).encode()
    return members


def write_shard(root: Path, truth: dict[str, Marks] = TRUTH) -> Path:
    return pack(root / "val-0.tar", pairs(truth))


class Seer(nn.Module):
    """Finds the one coloured rectangle on black: red is 1, green 2, blue 3. ``blind`` to one of them."""

    def __init__(self, blind: int = 0, shift: int = 0, scale: float = 1.0) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.blind, self.shift, self.scale = blind, shift, scale

    def forward(self, images: list[Tensor]) -> list[Image_]:
        answers = []
        for image in images:
            channels, rows, columns = (image > 0.5).nonzero(as_tuple=True)
            seen = len(rows) > 0 and int(channels[0]) + 1 != self.blind
            box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1] if seen else []
            answers.append(
                {
                    "boxes": self.scale * torch.tensor(box).float().reshape(-1, 4),
                    "labels": (channels[:1] + 1 + self.shift)[: int(seen)],
                    "scores": image.max().reshape(1)[: int(seen)],
                }
            )
        return answers


DETECTORS = """
from tests.support.scenes import Seer
from torch import nn

def build():
    return Seer()

def blind():
    return Seer(blind=3)

def shifted():
    return Seer(shift=1)

def classifier():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
"""


COLOURS = ["red", "green", "blue"]


def coloured(label: int, box: tuple[int, int, int, int]) -> bytes:
    pixels = np.zeros((24, 30, 3), dtype=np.uint8)
    if label:
        pixels[box[1] : box[3], box[0] : box[2], label - 1] = 255
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_scenes(path: Path, images: int = 12, **members: bytes) -> Path:
    """A quarter of the pictures is empty."""
    generator = np.random.default_rng(0)
    inside = {}
    for number in range(images):
        x, y, width, height = generator.integers(1, 12, 4).tolist()
        box, label = (x, y, x + width, y + height), number % 4
        marks = [{"label": label - 1, "box": box, "difficult": 0}] if label else []
        inside[f"{number:03}.png"] = coloured(label, box)
        inside[f"{number:03}.json"] = json.dumps({"width": 30, "height": 24, "objects": marks}).encode()
    pack(path, {**inside, **{name.replace("_", "."): data for name, data in members.items()}})
    (path.parent / "classes.json").write_text(json.dumps(COLOURS))
    return path


@pytest.fixture
def scenes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "seer.py").write_text(DETECTORS)
    write_scenes(tmp_path / "data" / "val-0.tar")
    monkeypatch.chdir(tmp_path)
    return tmp_path


Image_ = dict[str, Tensor]
