"""Images with labelled boxes: from VOC folders, COCO's JSON or tar shards, and as tensors for a detector.

A file that cannot be read, and an image or an annotation that is alone, are errors.
"""

from __future__ import annotations

import io
import json
import math
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from leanconv.errors import LeanconvError, listing, unknown_name
from leanconv.images.find import HELD_OUT, TRAINING, is_pattern, matching, members_of
from leanconv.images.loading import spread
from leanconv.images.picture import Picture, is_picture
from leanconv.images.preprocess import whole_picture

# In the order of their labels.
VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
CLASSES_FILE = "classes.json"
FORMATS = "a VOC folder (Annotations, JPEGImages), a COCO annotation .json, or .tar shards of id.jpg and id.json"
# file.json, or file.json:folder of the images.
COCO_PATH = re.compile(r"(.+\.json)(?::(.+))?")

# The objects of an image, as detectors are trained on them. boxes n x 4 float32: xmin, ymin, xmax, ymax in pixels from
# the upper left corner, where pixel i covers i to i + 1. labels n int64 from 1. difficult n bool: not scored (VOC's
# difficult, COCO's crowds).
Target = dict[str, Tensor]


@dataclass(frozen=True)
class Scene:
    """An image of ``width`` x ``height`` pixels and its objects, if any."""

    picture: Picture
    width: int
    height: int
    target: Target


@dataclass(frozen=True)
class Scenes:
    """Label i is the class ``classes[i - 1]``. ``clipped`` and ``dropped`` count the boxes that were partly and wholly
    outside their image."""

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
        """A sentence about boxes that were changed; None if all are as they were."""
        if not self.clipped and not self.dropped:
            return None
        return (
            f"{self.clipped} boxes reached beyond their image and were clipped; {self.dropped} were empty inside it "
            "and were dropped."
        )

    def spread(self, count: int) -> Scenes:
        """``count`` scenes spread evenly over all."""
        return replace(self, scenes=tuple(spread(self.scenes, count)))


@dataclass(frozen=True)
class SceneSet(Dataset[tuple[Tensor, Target]]):
    """Scenes as items: the image, float32 3 x height x width in [0, 1], and its target with an image_id."""

    scenes: Scenes

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
        return image, {**scene.target, "image_id": torch.tensor(index)}


@dataclass(frozen=True)
class Mark:
    """One object; its box is xmin, ymin, xmax, ymax as in ``Target``."""

    name: str
    box: tuple[float, float, float, float]
    difficult: bool


@dataclass(frozen=True)
class Annotation:
    """What ``file`` says about an image; ``size`` is (width, height), None where the file has none."""

    file: str
    picture: Picture
    size: tuple[int, int] | None
    marks: tuple[Mark, ...]


# All annotations, and the names of the classes in order where the data has such a list.
Annotated = tuple[list[Annotation], tuple[str, ...] | None]


def find_scenes(path: str | Path, split: str | None = None) -> Scenes:
    """Every annotated image of ``path``, or of one ``split`` of it.

    ``path``: a VOC folder or the devkit around it (``split`` is a list in ImageSets/Main); a COCO annotation, with the
    images beside it, in COCO's usual folder, or in the folder of ``file.json:folder``; a tar file, a folder of them or
    a pattern, with pairs of ``id.jpg`` and ``id.json`` (``split`` is a word in the names of the tar files).
    Labels follow the order of the classes in the data (COCO's ids, ``classes.json`` beside the shards, VOC's twenty);
    without such a list the names are sorted.
    """
    annotations, listed = _annotated(path, split)
    classes = listed or tuple(sorted({mark.name for annotation in annotations for mark in annotation.marks}))
    repeated = [name for name, count in Counter(classes).items() if count > 1]
    if repeated:
        raise LeanconvError(f"{str(path)!r} has several classes called {listing(repeated, 3)}; give each its own name.")
    labels = {name: label for label, name in enumerate(classes, start=1)}
    scenes, clipped, dropped = zip(*(_scene(annotation, labels) for annotation in annotations), strict=True)
    return Scenes(scenes, classes, sum(clipped), sum(dropped))


def splits(path: str | Path) -> list[str]:
    """The splits of ``path``: lists of a VOC folder, or train, val and test in the names of shards."""
    if COCO_PATH.fullmatch(str(path)):
        return []
    if folder := _voc_folder(Path(path)):
        return _voc_splits(folder)
    tars = _tar_files(path)
    return [word for word in (TRAINING, *HELD_OUT) if any(word in _words(tar) for tar in tars)]


def _annotated(path: str | Path, split: str | None) -> Annotated:
    if coco := COCO_PATH.fullmatch(str(path)):
        if split is not None:
            raise LeanconvError(f"{str(path)!r} is one split by itself; give the file of {split!r} in its place.")
        return _coco(Path(coco[1]), coco[2])
    if folder := _voc_folder(Path(path)):
        return _voc(folder, split)
    tars = _tar_files(path)
    if split is not None:
        known = sorted({word for tar in tars for word in _words(tar)})
        tars = [tar for tar in tars if split in _words(tar)]
        if not tars:
            raise unknown_name(split, known, what="split", where=repr(str(path)))
    classes = _listed_classes(tars[0].parent / CLASSES_FILE)
    return [annotation for tar in tars for annotation in _shard(tar, classes)], classes


def _scene(annotation: Annotation, labels: dict[str, int]) -> tuple[Scene, int, int]:
    """The scene, and how many boxes were clipped and dropped."""
    for mark in annotation.marks:
        if mark.name not in labels:
            raise LeanconvError(
                f"{annotation.file!r} names the class {mark.name!r}, which is none of {listing(labels, 8)}; correct "
                "it, or give all classes."
            )
        if not all(math.isfinite(value) for value in mark.box):
            raise LeanconvError(f"{annotation.file!r} has the box {mark.box}; repair it.")
    width, height = annotation.size or _size_of(annotation.picture)
    boxes = torch.tensor([mark.box for mark in annotation.marks], dtype=torch.float32).reshape(-1, 4)
    inside = boxes.clamp(min=0).minimum(torch.tensor([width, height, width, height]))
    kept = (inside[:, :2] < inside[:, 2:]).all(dim=1)
    clipped = kept & (inside != boxes).any(dim=1)
    target = {
        "boxes": inside[kept],
        "labels": torch.tensor([labels[mark.name] for mark in annotation.marks], dtype=torch.int64)[kept],
        "difficult": torch.tensor([mark.difficult for mark in annotation.marks], dtype=torch.bool)[kept],
    }
    return Scene(annotation.picture, width, height, target), int(clipped.sum()), int((~kept).sum())


def _size_of(picture: Picture) -> tuple[int, int]:
    try:
        with Image.open(io.BytesIO(picture.read())) as image:
            return image.width, image.height
    except OSError as error:
        raise LeanconvError(
            f"nothing says how large {picture.name!r} is, and it cannot be read ({error}); repair or remove it."
        ) from None


# VOC.


def _voc_folder(path: Path) -> Path | None:
    """``path``, or the one folder with annotations in a devkit below it."""
    candidates = [path, *sorted(path.glob("VOC*")), *sorted(path.glob("VOCdevkit/VOC*"))]
    folders = [folder for folder in candidates if (folder / "Annotations").is_dir()]
    if len(folders) > 1:
        raise LeanconvError(f"{str(path)!r} holds {listing(x.name for x in folders)}; give one of these folders.")
    return folders[0] if folders else None


def _voc_splits(folder: Path) -> list[str]:
    """Without the lists of single classes, such as cat_val."""
    return sorted(file.stem for file in (folder / "ImageSets" / "Main").glob("*.txt") if "_" not in file.stem)


def _voc(folder: Path, split: str | None) -> Annotated:
    files = {file.stem: file for file in (folder / "Annotations").glob("*.xml")}
    pictures = {file.stem: file for file in sorted((folder / "JPEGImages").glob("*")) if is_picture(file)}
    if split is None:
        names = sorted({*files, *pictures})
    else:
        chosen = folder / "ImageSets" / "Main" / f"{split}.txt"
        if not chosen.is_file():
            raise unknown_name(split, _voc_splits(folder), what="split", where=repr(str(folder)))
        names = [line.split()[0] for line in chosen.read_text().splitlines() if line.strip()]
    if not names:
        which = "" if split is None else f"split {split!r} of "
        raise LeanconvError(f"{which}{str(folder)!r} has no images; give another.")
    _check_pairs(str(folder), names, pictures, files)
    annotations = [_voc_annotation(files[name], pictures[name]) for name in names]
    standard = all(mark.name in VOC_CLASSES for annotation in annotations for mark in annotation.marks)
    return annotations, VOC_CLASSES if standard else None


def _voc_annotation(file: Path, picture: Path) -> Annotation:
    try:
        root = ElementTree.parse(file).getroot()
        marks = tuple(_voc_mark(element) for element in root.findall("object"))
        width, height = (int(float(root.findtext(f"size/{side}") or 0)) for side in ("width", "height"))
    except (OSError, ElementTree.ParseError, ValueError) as error:
        raise _unreadable(str(file), "a VOC annotation", error) from None
    size = (width, height) if width > 0 and height > 0 else None
    return Annotation(str(file), Picture(str(picture), picture.name, None), size, marks)


def _voc_mark(element: ElementTree.Element) -> Mark:
    """VOC counts pixels from 1 and includes the last one: its 1..3 are the pixels from 0 to 3."""
    xmin, ymin, xmax, ymax = (float(_text(element, f"bndbox/{side}")) for side in ("xmin", "ymin", "xmax", "ymax"))
    difficult = (element.findtext("difficult") or "0").strip() not in ("", "0")
    return Mark(_text(element, "name"), (xmin - 1, ymin - 1, xmax, ymax), difficult)


def _text(element: ElementTree.Element, path: str) -> str:
    text = (element.findtext(path) or "").strip()
    if not text:
        raise ValueError(f"an object has no {path}")
    return text


# COCO.


def _coco(file: Path, folder: str | None) -> Annotated:
    try:
        data = json.loads(file.read_bytes())
        classes = {int(entry["id"]): str(entry["name"]) for entry in data["categories"]}
        images = {int(entry["id"]): (str(entry["file_name"]), _size(entry)) for entry in data["images"]}
        marks: dict[int, list[Mark]] = {image_id: [] for image_id in images}
        for entry in data["annotations"]:
            marks[int(entry["image_id"])].append(_coco_mark(entry, classes))
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise _unreadable(str(file), "a COCO annotation", error) from None
    if not images:
        raise LeanconvError(f"{str(file)!r} has no images; give another.")
    # COCO keeps annotations/instances_val2017.json beside val2017/.
    usual = file.parent.parent / file.stem.removeprefix("instances_")
    beside = usual if usual.is_dir() and file.parent.name == "annotations" else file.parent
    home = Path(folder) if folder else beside
    missing = [name for name, _ in images.values() if not (home / name).is_file()]
    if missing:
        raise LeanconvError(
            f"{str(file)!r} names {len(missing)} images that are not in {str(home)!r} ({listing(missing, 3)}); give "
            "their folder: FILE.json:FOLDER."
        )
    annotations = [
        Annotation(str(file), Picture(str(home / name), name, None), size, tuple(marks[image_id]))
        for image_id, (name, size) in images.items()
    ]
    return annotations, tuple(classes[category] for category in sorted(classes))


def _coco_mark(entry: dict[str, Any], classes: dict[int, str]) -> Mark:
    x, y, width, height = (float(value) for value in entry["bbox"])
    return Mark(classes[int(entry["category_id"])], (x, y, x + width, y + height), bool(entry.get("iscrowd", 0)))


def _size(data: dict[str, Any]) -> tuple[int, int] | None:
    return (int(data["width"]), int(data["height"])) if data.get("width") and data.get("height") else None


# Tar shards.


def _tar_files(path: str | Path) -> list[Path]:
    text, path = str(path), Path(path)
    if path.is_dir():
        tars = sorted(path.glob("*.tar"))
    elif path.is_file():
        tars = [path] if path.suffix == ".tar" else []
    else:
        tars = matching(text) if is_pattern(text) else []
    if not tars:
        problem = "holds no annotated images" if os.path.exists(text) else "does not exist"
        raise LeanconvError(f"{text!r} {problem}; give {FORMATS}.")
    return tars


def _words(tar: Path) -> set[str]:
    return set(re.findall("[a-z]+", tar.stem.lower()))


def _listed_classes(file: Path) -> tuple[str, ...] | None:
    if not file.is_file():
        return None
    try:
        names = json.loads(file.read_bytes())
    except ValueError as error:
        raise _unreadable(str(file), "a list of classes", error) from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise LeanconvError(f'{str(file)!r} is no list of names; write a JSON such as ["cat", "dog"].')
    return tuple(names)


def _shard(tar: Path, classes: Sequence[str] | None) -> list[Annotation]:
    members = [member for member in members_of(tar) if not PurePosixPath(member.name).name.startswith(".")]
    by_id = [(posixpath.splitext(member.name)[0], member) for member in members]
    pictures = {name: member for name, member in by_id if is_picture(PurePosixPath(member.name))}
    files = {name: member for name, member in by_id if member.name.endswith(".json")}
    if not pictures.keys() & files.keys():
        raise LeanconvError(f"{str(tar)!r} has no pairs of id.jpg and id.json; give {FORMATS}.")
    _check_pairs(str(tar), list(dict.fromkeys([*pictures, *files])), pictures, files)
    annotations = []
    with tar.open("rb") as archive:
        for name, member in pictures.items():
            file = f"{tar}/{files[name].name}"
            archive.seek(files[name].offset_data)
            try:
                data = json.loads(archive.read(files[name].size))
                marks = tuple(_shard_mark(entry, classes) for entry in data["objects"])
                size = _size(data)
            except (ValueError, TypeError, LookupError) as error:
                raise _unreadable(file, "an annotation", error) from None
            picture = Picture(str(tar), f"{tar.name}/{member.name}", None, member.offset_data, member.size)
            annotations.append(Annotation(file, picture, size, marks))
    return annotations


def _shard_mark(entry: dict[str, Any], classes: Sequence[str] | None) -> Mark:
    """A label is a name, or an index into ``classes``."""
    xmin, ymin, xmax, ymax = (float(value) for value in entry["box"])
    label = entry["label"]
    if not isinstance(label, str):
        if classes is None:
            raise ValueError(f"label {label} is a number, which needs a {CLASSES_FILE} beside the shards")
        if not 0 <= int(label) < len(classes):
            raise ValueError(f"label {label} is none of 0 to {len(classes) - 1}")
        label = classes[int(label)]
    return Mark(label, (xmin, ymin, xmax, ymax), bool(entry.get("difficult", 0)))


def _check_pairs(source: str, names: Sequence[str], pictures: Iterable[str], files: Iterable[str]) -> None:
    """An image without annotation is an error: it may well have objects."""
    for known, what in ((set(pictures), "picture"), (set(files), "annotation")):
        alone = [name for name in names if name not in known]
        if alone:
            raise LeanconvError(
                f"{source!r} has no {what} for {len(alone)} of {len(names)} images ({listing(alone, 3)}); add it, or "
                "remove them."
            )


def _unreadable(file: str, what: str, error: Exception) -> LeanconvError:
    reason = f"{error.args[0]!r} is missing or unknown" if isinstance(error, KeyError) else " ".join(str(error).split())
    return LeanconvError(f"{file!r} cannot be read as {what} ({reason[:200]}); repair or remove it.")
