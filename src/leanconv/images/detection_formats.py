"""Annotated pictures as VOC folders, COCO's JSON and tar shards write them: pictures, names of classes, boxes.

A file that cannot be understood, a picture without its annotation and an annotation without its picture are refused.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

from leanconv.errors import LeanconvError, listing, unknown_name
from leanconv.images.find import HELD_OUT, TRAINING, matching
from leanconv.images.picture import Picture, is_picture
from leanconv.images.tar import members_of

# In the order their labels have everywhere.
VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
CLASSES_FILE = "classes.json"
Place = str | Path | Sequence[str | Path]
FORMATS = "a VOC folder (Annotations, JPEGImages), a COCO annotation .json, or .tar shards of id.jpg and id.json"


@dataclass(frozen=True)
class Mark:
    """One object: xmin, ymin, xmax, ymax in pixels from the picture's upper left corner."""

    name: str
    box: tuple[float, float, float, float]
    difficult: bool


@dataclass(frozen=True)
class Annotation:
    """What ``place`` says of a picture; ``size`` is width and height, None where it does not say."""

    place: str
    picture: Picture
    size: tuple[int, int] | None
    marks: tuple[Mark, ...]


# All annotations of some data, and the classes it lists by itself, in their order.
Annotated = tuple[list[Annotation], tuple[str, ...] | None]


def annotated(path: Place, classes: Sequence[str] | None, split: str | None) -> Annotated:
    """Everything in ``path``, or its ``split`` only. ``classes`` name shards' labels that are plain numbers."""
    if coco := _coco_parts(path):
        if split is not None:
            raise LeanconvError(f"{str(path)!r} is one split by itself; give the file of {split!r} in its place.")
        return _coco(*coco)
    if folder := _voc_folder(path):
        return _voc(folder, split)
    tars = _tar_files(path)
    if split is not None:
        known = sorted({word for tar in tars for word in _words(tar)})
        tars = [tar for tar in tars if split in _words(tar)]
        if not tars:
            raise unknown_name(split, known, what="split", where=repr(str(path)))
    listed = _listed_classes(tars[0].parent / CLASSES_FILE)
    return [annotation for tar in tars for annotation in _shard(tar, listed or classes)], listed


def splits(path: Place) -> list[str]:
    """The splits ``path`` has: lists of a VOC folder, or train, val and test in the names of shards."""
    if _coco_parts(path):
        return []
    if folder := _voc_folder(path):
        return _voc_splits(folder)
    words = {word for tar in _tar_files(path) for word in _words(tar)}
    return [word for word in (TRAINING, *HELD_OUT) if word in words]


# VOC.


def _voc_folder(path: Place) -> Path | None:
    """``path`` or the one folder of a devkit below it that has annotations."""
    if not isinstance(path, str | Path):
        return None
    path = Path(path)
    places = [path, *sorted(path.glob("VOC*")), *sorted(path.glob("VOCdevkit/VOC*"))]
    folders = [place for place in places if (place / "Annotations").is_dir()]
    if len(folders) > 1:
        names = listing(folder.name for folder in folders)
        raise LeanconvError(f"{str(path)!r} holds {names}; give one of these folders.")
    return folders[0] if folders else None


def _voc_splits(folder: Path) -> list[str]:
    """Without the lists a class, such as cat_val."""
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
    _complete(str(folder), names, pictures, files)
    annotations = [_voc_annotation(files[name], pictures[name]) for name in names]
    twenty = all(mark.name in VOC_CLASSES for annotation in annotations for mark in annotation.marks)
    return annotations, VOC_CLASSES if twenty else None


def _voc_annotation(file: Path, picture: Path) -> Annotation:
    try:
        root = ElementTree.parse(file).getroot()
        marks = tuple(_voc_mark(element) for element in root.findall("object"))
        width, height = (int(float(root.findtext(f"size/{side}") or 0)) for side in ("width", "height"))
    except (OSError, ElementTree.ParseError, ValueError) as error:
        raise _broken(str(file), "a VOC annotation", error) from None
    size = (width, height) if width > 0 and height > 0 else None
    return Annotation(str(file), Picture(str(picture), picture.name, None), size, marks)


def _voc_mark(element: ElementTree.Element) -> Mark:
    """VOC numbers pixels from 1 and means the last one too; 1..3 are the pixels between 0 and 3."""
    xmin, ymin, xmax, ymax = (float(_text(element, f"bndbox/{side}")) for side in ("xmin", "ymin", "xmax", "ymax"))
    difficult = (element.findtext("difficult") or "0").strip() not in ("", "0")
    return Mark(_text(element, "name"), (xmin - 1, ymin - 1, xmax, ymax), difficult)


def _text(element: ElementTree.Element, path: str) -> str:
    text = (element.findtext(path) or "").strip()
    if not text:
        raise ValueError(f"an object has no {path}")
    return text


# COCO.


def _coco_parts(path: Place) -> tuple[Path, Path | None] | None:
    """``file.json`` or ``file.json:folder``."""
    parts = re.fullmatch(r"(.+\.json)(?::(.+))?", str(path)) if isinstance(path, str | Path) else None
    return None if parts is None else (Path(parts[1]), None if parts[2] is None else Path(parts[2]))


def _coco(file: Path, folder: Path | None) -> Annotated:
    try:
        data = json.loads(file.read_bytes())
        names = {int(entry["id"]): str(entry["name"]) for entry in data["categories"]}
        images = {int(entry["id"]): entry for entry in data["images"]}
        marks: dict[int, list[Mark]] = {number: [] for number in images}
        for entry in data["annotations"]:
            marks[int(entry["image_id"])].append(_coco_mark(entry, names))
        files = {number: str(entry["file_name"]) for number, entry in images.items()}
        sizes = {number: _size(entry) for number, entry in images.items()}
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise _broken(str(file), "a COCO annotation", error) from None
    if not images:
        raise LeanconvError(f"{str(file)!r} has no images; give another.")
    # COCO keeps annotations/instances_val2017.json beside val2017/.
    usual = file.parent.parent / file.stem.removeprefix("instances_")
    place = folder or (usual if usual.is_dir() and file.parent.name == "annotations" else file.parent)
    missing = [name for name in files.values() if not (place / name).is_file()]
    if missing:
        raise LeanconvError(
            f"{str(file)!r} names {len(missing)} images that are not in {str(place)!r} ({listing(missing, 3)}); give "
            "their folder: FILE.json:FOLDER."
        )
    return [
        Annotation(str(file), Picture(str(place / name), name, None), sizes[number], tuple(marks[number]))
        for number, name in files.items()
    ], tuple(names[number] for number in sorted(names))


def _coco_mark(entry: dict[str, Any], names: dict[int, str]) -> Mark:
    x, y, width, height = (float(value) for value in entry["bbox"])
    return Mark(names[int(entry["category_id"])], (x, y, x + width, y + height), bool(entry.get("iscrowd", 0)))


def _size(data: dict[str, Any]) -> tuple[int, int] | None:
    return (int(data["width"]), int(data["height"])) if data.get("width") and data.get("height") else None


# Tar shards.


def _tar_files(path: Place) -> list[Path]:
    if not isinstance(path, str | Path):
        return [tar for entry in path for tar in _tar_files(entry)]
    text, place = str(path), Path(path)
    if place.is_dir():
        tars = sorted(place.glob("*.tar"))
    elif place.is_file():
        tars = [place] if place.suffix == ".tar" else []
    else:
        tars = matching(text) if any(sign in text for sign in "*?[{") else []
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
        raise _broken(str(file), "a list of classes", error) from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise LeanconvError(f'{str(file)!r} is no list of names; write a JSON such as ["cat", "dog"].')
    return tuple(names)


def _shard(tar: Path, numbered: Sequence[str] | None) -> list[Annotation]:
    """``numbered``: what labels 0, 1, ... are called."""
    members = [member for member in members_of(tar) if not PurePosixPath(member.name).name.startswith(".")]
    pictures = {
        posixpath.splitext(member.name)[0]: member for member in members if is_picture(PurePosixPath(member.name))
    }
    files = {posixpath.splitext(member.name)[0]: member for member in members if member.name.endswith(".json")}
    if not pictures.keys() & files.keys():
        raise LeanconvError(f"{str(tar)!r} has no pairs of id.jpg and id.json; give {FORMATS}.")
    names = list(dict.fromkeys([*pictures, *files]))
    _complete(str(tar), names, pictures, files)
    annotations = []
    with tar.open("rb") as opened:
        for name in names:
            place, picture = f"{tar}/{files[name].name}", pictures[name]
            opened.seek(files[name].offset_data)
            try:
                data = json.loads(opened.read(files[name].size))
                marks = tuple(_shard_mark(entry, numbered) for entry in data["objects"])
                size = _size(data)
            except (ValueError, TypeError, LookupError) as error:
                raise _broken(place, "an annotation", error) from None
            there = Picture(str(tar), f"{tar.name}/{picture.name}", None, picture.offset_data, picture.size)
            annotations.append(Annotation(place, there, size, marks))
    return annotations


def _shard_mark(entry: dict[str, Any], numbered: Sequence[str] | None) -> Mark:
    xmin, ymin, xmax, ymax = (float(value) for value in entry["box"])
    label = entry["label"]
    if not isinstance(label, str):
        if numbered is None:
            raise ValueError(f"label {label} is a number, which needs a {CLASSES_FILE} beside the shards")
        if not 0 <= int(label) < len(numbered):
            raise ValueError(f"label {label} is none of 0 to {len(numbered) - 1}")
        label = numbered[int(label)]
    return Mark(label, (xmin, ymin, xmax, ymax), bool(entry.get("difficult", 0)))


def _complete(place: str, names: Sequence[str], pictures: dict[str, Any], files: dict[str, Any]) -> None:
    """Refuse halves: a picture that nothing is said of is not one without objects."""
    for missing, what in ((pictures, "picture"), (files, "annotation")):
        alone = [name for name in names if name not in missing]
        if alone:
            raise LeanconvError(
                f"{place!r} has no {what} for {len(alone)} of {len(names)} images ({listing(alone, 3)}); add it, or "
                "remove them."
            )


def _broken(place: str, what: str, error: Exception) -> LeanconvError:
    said = f"{error.args[0]!r} is missing or unknown" if isinstance(error, KeyError) else " ".join(str(error).split())
    return LeanconvError(f"{place!r} cannot be read as {what} ({said[:200]}); repair or remove it.")
