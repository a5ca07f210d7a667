"""Pictures with objects in them: where they are, of which class, and as tensors for a detector."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from leanconv.errors import LeanconvError, listing
from leanconv.images.detection_formats import Annotation, Place, annotated, splits
from leanconv.images.loading import spread
from leanconv.images.picture import Picture
from leanconv.images.preprocess import whole_picture

__all__ = ["Objects", "Scene", "SceneSet", "Scenes", "find_scenes", "splits"]

# boxes n x 4, labels n, difficult n, image_id: what a detector is trained on.
Target = dict[str, Tensor]


@dataclass(frozen=True)
class Objects:
    """``boxes`` n x 4 float32: xmin, ymin, xmax, ymax in pixels from the upper left corner, where pixel i reaches from
    i to i + 1. ``labels`` n int64 from 1. ``difficult`` n bool: not to be found (VOC's difficult, COCO's crowds)."""

    boxes: Tensor
    labels: Tensor
    difficult: Tensor


@dataclass(frozen=True)
class Scene:
    """A picture, ``width`` x ``height`` pixels, and its objects, of which there may be none."""

    picture: Picture
    width: int
    height: int
    objects: Objects


@dataclass(frozen=True)
class Scenes:
    """Label i belongs to ``classes[i - 1]``. ``clipped`` boxes reached beyond their picture, ``dropped`` ones had
    nothing inside it."""

    scenes: tuple[Scene, ...]
    classes: tuple[str, ...]
    clipped: int = 0
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> Scene:
        return self.scenes[index]

    @property
    def remark(self) -> str | None:
        """What was done to boxes, as a sentence; None if nothing was."""
        if not self.clipped and not self.dropped:
            return None
        return (
            f"{self.clipped} boxes reached beyond their image and were clipped; {self.dropped} were empty inside it "
            "and were dropped."
        )

    def spread(self, count: int) -> Scenes:
        """``count`` scenes spread evenly over all."""
        return replace(self, scenes=tuple(spread(self.scenes, count)))


def find_scenes(path: Place, classes: Sequence[str] | None = None, split: str | None = None) -> Scenes:
    """Every annotated picture of ``path``, or of one ``split`` of it.

    ``path``: a VOC folder or the devkit it lies in (``split`` is a list in ImageSets/Main); a COCO annotation, with the
    pictures beside it, in COCO's usual place, or in a folder given as ``file.json:folder``; a tar file, several,
    a folder of them or a pattern, with pairs of ``id.jpg`` and ``id.json`` (``split`` is a word of the shards' names).
    ``classes``: names in the order of their labels. Default: what the data lists (COCO's categories in order of their
    ids, ``classes.json`` beside the shards, VOC's twenty), else the names found, sorted.
    """
    annotations, listed = annotated(path, classes, split)
    names = tuple(classes or listed or sorted({mark.name for each in annotations for mark in each.marks}))
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise LeanconvError(f"{str(path)!r} has several classes called {listing(twice, 3)}; give each its own name.")
    labels = {name: number for number, name in enumerate(names, start=1)}
    read = [_scene(annotation, labels) for annotation in annotations]
    scenes, clipped, dropped = zip(*read, strict=True)
    return Scenes(scenes, names, sum(clipped), sum(dropped))


def _scene(annotation: Annotation, labels: dict[str, int]) -> tuple[Scene, int, int]:
    """The scene, and how many boxes were clipped and dropped."""
    for mark in annotation.marks:
        if mark.name not in labels:
            raise LeanconvError(
                f"{annotation.place!r} names the class {mark.name!r}, which is none of {listing(labels, 8)}; correct "
                "it, or give all classes."
            )
        if not all(math.isfinite(value) for value in mark.box):
            raise LeanconvError(f"{annotation.place!r} has the box {mark.box}; repair it.")
    width, height = annotation.size or _size_of(annotation.picture)
    boxes = torch.tensor([mark.box for mark in annotation.marks], dtype=torch.float32).reshape(-1, 4)
    inside = boxes.clamp(min=0).minimum(torch.tensor([width, height, width, height]))
    inner = (inside[:, :2] < inside[:, 2:]).all(dim=1)
    clipped = int((inner & (inside != boxes).any(dim=1)).sum())
    objects = Objects(
        inside[inner],
        torch.tensor([labels[mark.name] for mark in annotation.marks], dtype=torch.int64)[inner],
        torch.tensor([mark.difficult for mark in annotation.marks], dtype=torch.bool)[inner],
    )
    return Scene(annotation.picture, width, height, objects), clipped, int((~inner).sum())


def _size_of(picture: Picture) -> tuple[int, int]:
    try:
        with Image.open(io.BytesIO(picture.read())) as opened:
            return opened.width, opened.height
    except OSError as error:
        raise LeanconvError(
            f"nothing says how large {picture.name!r} is, and it cannot be read ({error}); repair or remove it."
        ) from None


class SceneSet(Dataset[tuple[Tensor, Target]]):
    """Scenes as items: the image, float32 3 x height x width in [0, 1], and its target.

    ``flip``: every other image, at random, is mirrored left to right with its boxes.
    """

    def __init__(self, scenes: Scenes, flip: bool = False):
        self.scenes = scenes
        self.flip = flip

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        scene = self.scenes[index]
        image = whole_picture(scene.picture.read())
        if image.shape[1:] != (scene.height, scene.width):
            raise LeanconvError(
                f"{scene.picture.name!r} is {image.shape[2]} x {image.shape[1]} pixels, but its annotation is for "
                f"{scene.width} x {scene.height}; its boxes do not fit."
            )
        boxes = scene.objects.boxes
        if self.flip and torch.rand(()) < 0.5:
            image = image.flip(-1)
            boxes = torch.stack([scene.width - boxes[:, 2], boxes[:, 1], scene.width - boxes[:, 0], boxes[:, 3]], dim=1)
        labels, difficult = scene.objects.labels, scene.objects.difficult
        return image, {"boxes": boxes, "labels": labels, "difficult": difficult, "image_id": torch.tensor(index)}
