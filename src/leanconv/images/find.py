"""Where the pictures are: folders, tar files, shards, Hugging Face datasets. All of them are found here."""

from __future__ import annotations

import glob
import os
import re
import tarfile
from pathlib import Path

from leanconv.errors import LeanconvError, listing
from leanconv.images.huggingface import PREFIX, dataset_pictures, is_saved_dataset
from leanconv.images.picture import SUFFIXES, Picture, is_picture
from leanconv.images.tar import pictures_in_tar

__all__ = ["HELD_OUT", "TRAINING", "Picture", "find_pictures", "held_out"]

# What folders of training and of held-out pictures are called; of the latter, the first there is counts.
TRAINING = "train"
HELD_OUT = ("val", "validation", "valid", "test")


def find_pictures(path: str | Path) -> list[Picture]:
    """Every picture of ``path``, in order of name. Hidden files are passed over.

    ``path``: a folder, with or without class folders; a folder of tar files; a tar file; several, as a pattern
    (``val-{000..003}.tar``, ``val-*.tar``); a picture; ``hf:NAME[:SPLIT]``; a folder that ``save_to_disk`` wrote.
    """
    text = str(path)
    place = Path(text)
    if text.startswith(PREFIX):
        pictures = dataset_pictures(text)
    elif not os.path.exists(text) and any(sign in text for sign in "*?[{"):
        pictures = [picture for tar in matching(text) for picture in pictures_in_tar(tar, f"{tar.as_posix()}/")]
    elif not os.path.exists(text):
        raise LeanconvError(f"{text!r} does not exist; give a folder of images, a .tar file, a pattern or hf:NAME.")
    elif place.is_dir():
        pictures = dataset_pictures(text) if is_saved_dataset(place) else _in_folder(place)
    elif tarfile.is_tarfile(place):
        pictures = pictures_in_tar(place)
    elif place.suffix.lower() in SUFFIXES:
        pictures = [Picture(text, place.name, None)]
    else:
        raise LeanconvError(f"{text!r} is neither a folder, a .tar file nor an image.")
    if not pictures:
        raise LeanconvError(f"no images in {text!r}; looked for {' '.join(SUFFIXES)}.")
    return sorted(pictures, key=lambda picture: picture.name)


def held_out(path: str) -> str:
    """``path/val`` where ``path`` has folders both for training and for validation, else ``path`` itself."""
    if os.path.isdir(os.path.join(path, TRAINING)):
        for name in HELD_OUT:
            if os.path.isdir(os.path.join(path, name)):
                return os.path.join(path, name)
    return path


def _in_folder(root: Path) -> list[Picture]:
    """The pictures; where there are none, those in the tar files."""
    pictures, tars = [], []
    seen: set[str] = set()  # a link to a folder above would go round for ever
    for folder, below, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        below[:] = [] if real in seen else [name for name in below if not name.startswith(".")]
        for path in [] if real in seen else [Path(folder) / name for name in files]:
            relative = path.relative_to(root)
            if path.suffix == ".tar" and not path.name.startswith("."):
                tars.append((path, f"{relative.as_posix()}/"))
            if path.is_file() and is_picture(path):
                pictures.append(Picture(str(path), relative.as_posix(), relative.parent.name or None))
        seen.add(real)
    return pictures or [picture for path, prefix in tars for picture in pictures_in_tar(path, prefix)]


def matching(pattern: str) -> list[Path]:
    """The tar files a pattern names; every one that braces spell out must be there."""
    tars = []
    for text in _without_braces(pattern):
        names = sorted(glob.glob(text, recursive=True)) if any(sign in text for sign in "*?[") else [text]
        tars += [Path(name) for name in names]
    wrong = [str(path) for path in tars if not (path.is_file() and tarfile.is_tarfile(path))]
    if wrong or not tars:
        which = f"names {listing(wrong, 3)}, not there or no .tar file" if wrong else "matches nothing"
        raise LeanconvError(f"{pattern!r} {which}; a pattern must name .tar files.")
    return tars


def _without_braces(pattern: str) -> list[str]:
    """``a-{08..10}`` -> a-08 a-09 a-10; ``{train,val}`` -> train val."""
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if braces is None:
        return [pattern]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", braces[1])
    if span:
        numbers = range(int(span[1]), int(span[2]) + 1)
        choices = [str(number).zfill(len(span[1])) for number in numbers]
    else:
        choices = braces[1].split(",")
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    return [whole for choice in choices for whole in _without_braces(before + choice + after)]
