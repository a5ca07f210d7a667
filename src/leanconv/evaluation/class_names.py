"""The classes of pictures, and the outputs they stand for."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from leanconv.errors import LeanconvError, listing
from leanconv.images.find import HELD_OUT, TRAINING
from leanconv.images.picture import Picture


class ClassIndices(dict[str, int]):
    """Class name -> output. ``by_order``: taken from the alphabetical order of the names, which is right only if there
    is a name for every output."""

    by_order = False

    def check(self, outputs: int) -> None:
        """Refuse labels that do not fit a network with this many ``outputs``."""
        if self.by_order and len(self) != outputs:
            raise LeanconvError(
                f"the data has {len(self)} class names but the network {outputs} outputs, so their order does not "
                "say which is which; give --classes FILE, a JSON of {name: class index}."
            )
        beyond = [f"{name}: {index}" for name, index in self.items() if not 0 <= index < outputs]
        if beyond:
            raise LeanconvError(f"class indices must be 0 to {outputs - 1}; found {listing(beyond, 3)}.")


def class_indices(pictures: Sequence[Picture], file: Path | None) -> ClassIndices:
    """From a JSON file, from names that are numbers, or from their alphabetical order."""
    unlabelled = [picture.name for picture in pictures if picture.label is None]
    if unlabelled:
        raise LeanconvError(
            f"{len(unlabelled)} images lie in no class folder ({listing(unlabelled, 2)}) and nothing else gives their "
            "class; give a folder a class, or --labels FILE."
        )
    _check_parts(pictures)
    names = sorted({picture.label for picture in pictures if picture.label is not None})
    if file is not None:
        return _from_file(file, names)
    if all(name.isascii() and name.isdecimal() for name in names):
        return ClassIndices({name: int(name) for name in names})
    indices = ClassIndices({name: index for index, name in enumerate(names)})
    indices.by_order = True
    return indices


def class_indices_of_both(
    training: Sequence[Picture], judged: Sequence[Picture] | None, file: Path | None
) -> ClassIndices:
    """The same, for pictures to train on and pictures to judge by, whose classes must have the same names."""
    unlabelled = [picture.name for picture in (*training, *(judged or ())) if picture.label is None]
    if unlabelled:
        raise LeanconvError(
            f"{len(unlabelled)} images lie in no class folder ({listing(unlabelled, 2)}); give a folder a class, or "
            "--distill ORIGINAL to train without labels."
        )
    mapping = class_indices(training, file)
    if judged is None:
        return mapping
    other = class_indices(judged, file)
    if other.by_order != mapping.by_order:
        raise LeanconvError(
            f"the classes are named {listing(list(mapping), 2)} where they are trained on and "
            f"{listing(list(other), 2)} where they are judged by; name them alike."
        )
    if mapping.by_order and (missing := [name for name in other if name not in mapping]):
        raise LeanconvError(f"there are validation images of {listing(missing, 3)}, and none to train on; give some.")
    if not mapping.by_order:
        mapping.update(other)
    return mapping


def _check_parts(pictures: Sequence[Picture]) -> None:
    """Refuse training and validation pictures together: a figure for both means nothing."""
    parts_named: set[str] = set()
    for folder in {PurePosixPath(picture.name).parent for picture in pictures}:
        parts = folder.parts if folder.suffix == ".tar" else folder.parts[:-1]  # without the class's own folder
        words = {word for part in parts for word in re.findall("[a-z]+", part.lower())}
        here = [word for word in (TRAINING, *HELD_OUT) if word in words]
        if TRAINING not in here or len(here) == 1:  # both, as in train/imagenet/val: not known which it is
            parts_named.update(here)
    other = [word for word in HELD_OUT if word in parts_named]
    if TRAINING in parts_named and other:
        raise LeanconvError(
            f"the data holds images of {TRAINING} and {other[0]} together; give the place of {other[0]} alone."
        )


def labelled(pictures: Sequence[Picture], file: Path) -> list[Picture]:
    """The pictures with classes from a text file: a class a line in order of the pictures' names, or 'name class'."""
    try:
        lines = [re.split(r"[,\s]+", line.strip()) for line in file.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise LeanconvError(f"--labels {str(file)!r} cannot be read ({error}); give a text file.") from None
    if all(len(line) == 1 for line in lines):
        if len(lines) != len(pictures):
            raise LeanconvError(
                f"--labels {str(file)!r} has {len(lines)} lines for {len(pictures)} images; give a class a line, in "
                "order of the file names, or 'name class' lines."
            )
        return [replace(picture, label=line[0]) for picture, line in zip(pictures, lines, strict=True)]
    listed = {line[0]: line[1] for line in lines if len(line) > 1}
    keys = [_key_in(listed, picture) for picture in pictures]
    missing = [picture.name for picture, key in zip(pictures, keys, strict=True) if key is None]
    twice = [key for key, count in Counter(keys).items() if count > 1 and key is not None]
    if missing or twice:
        problem = f"no class for {listing(missing, 3)}" if missing else f"one line for several images ({twice[0]})"
        raise LeanconvError(f"--labels {str(file)!r} has {problem}; give a 'name class' line an image.")
    return [replace(picture, label=listed[key or ""]) for picture, key in zip(pictures, keys, strict=True)]


def _key_in(listed: dict[str, str], picture: Picture) -> str | None:
    """How a list names a picture: by its path, by its file name, or by that without the suffix."""
    path = PurePosixPath(picture.name)
    return next((key for key in (picture.name, path.name, path.stem) if key in listed), None)


def _from_file(file: Path, names: list[str]) -> ClassIndices:
    try:
        data = json.loads(file.read_text())
        indices = {name: value[0] if isinstance(value, list) else value for name, value in data.items()}
    except (OSError, ValueError, AttributeError, IndexError) as error:
        raise LeanconvError(f"--classes {str(file)!r} cannot be read ({error}); give a JSON object.") from None
    missing = [name for name in names if not isinstance(indices.get(name), int)]
    if missing:
        raise LeanconvError(f"--classes {str(file)!r} gives no class index for {listing(missing, 3)}.")
    return ClassIndices({name: indices[name] for name in names})


# What COCO, and so torchvision's weights, call VOC's classes.
SYNONYMS = {
    "aeroplane": "airplane",
    "diningtable": "dining table",
    "motorbike": "motorcycle",
    "pottedplant": "potted plant",
    "sofa": "couch",
    "tvmonitor": "tv",
}


def detector_labels(
    name: str, outputs: int | None, categories: Sequence[str] | None, classes: Sequence[str], file: Path | None
) -> dict[int, int] | None:
    """Labels of the detector ``name`` -> labels of data with these ``classes``; None where they are the same.

    From ``file``, or from ``categories``, the names of the detector's labels from 0. ``outputs``: the number of its
    classes, background included, if it is known.
    """
    if file is not None:
        indices = _from_file(file, list(classes))
        if outputs is not None:
            indices.check(outputs)
        return {indices[each]: label for label, each in enumerate(classes, start=1)}
    if categories is not None and len(categories) == outputs:
        known = {category: label for label, category in enumerate(categories)}
        theirs = [each if each in known else SYNONYMS.get(each, each) for each in classes]
        if missing := [each for each in theirs if each not in known]:
            raise LeanconvError(
                f"{name} knows no {listing(missing, 3)} by its weights' categories; give data with classes it knows, "
                "or --classes FILE, a JSON of {name: label}."
            )
        return {known[each]: label for label, each in enumerate(theirs, start=1)}
    if outputs not in (None, len(classes) + 1):
        raise LeanconvError(
            f"{name} tells {outputs} classes apart, background included, but the data has {len(classes)}, which needs "
            f"{len(classes) + 1}; give a network for these, or --classes FILE, a JSON of {{name: label}}."
        )
    return None
