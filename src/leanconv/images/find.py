"""Where the pictures are: folders, tar files, shards, Hugging Face datasets."""

from __future__ import annotations

import glob
import json
import os
import posixpath
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from leanconv.errors import LeanconvError, listing
from leanconv.images.huggingface import PREFIX, dataset_pictures, is_saved_dataset
from leanconv.images.picture import SUFFIXES, Picture, is_picture

# Names of folders of training and of held-out pictures; of the latter, the first that exists counts.
TRAINING = "train"
HELD_OUT = ("val", "validation", "valid", "test")
# Keys under which ``id.json`` in a shard may give the class.
JSON_KEYS = ("label", "cls", "class")


def find_pictures(path: str | Path) -> list[Picture]:
    """Every picture of ``path``, in order of name, without hidden files.

    ``path``: a folder, with or without class folders; a folder of tar files; a tar file; several, as a pattern
    (``val-{000..003}.tar``, ``val-*.tar``); a picture; ``hf:NAME[:SPLIT]``; a folder that ``save_to_disk`` wrote.
    """
    text, path = str(path), Path(path)
    if text.startswith(PREFIX):
        pictures = dataset_pictures(text)
    elif not os.path.exists(text) and is_pattern(text):
        pictures = [picture for tar in matching(text) for picture in _in_tar(tar, f"{tar.as_posix()}/")]
    elif not os.path.exists(text):
        raise LeanconvError(f"{text!r} does not exist; give a folder of images, a .tar file, a pattern or hf:NAME.")
    elif path.is_dir():
        pictures = dataset_pictures(text) if is_saved_dataset(path) else _in_folder(path)
    elif tarfile.is_tarfile(path):
        pictures = _in_tar(path)
    elif path.suffix.lower() in SUFFIXES:
        pictures = [Picture(text, path.name, None)]
    else:
        raise LeanconvError(f"{text!r} is neither a folder, a .tar file nor an image.")
    if not pictures:
        raise LeanconvError(f"no images in {text!r}; looked for {' '.join(SUFFIXES)}.")
    return sorted(pictures, key=lambda picture: picture.name)


def held_out(path: str) -> str:
    """``path/val`` where ``path`` has folders both for training and for validation, else ``path`` itself."""
    names = HELD_OUT if os.path.isdir(os.path.join(path, TRAINING)) else ()
    folders = (os.path.join(path, name) for name in names)
    return next((folder for folder in folders if os.path.isdir(folder)), path)


def is_pattern(text: str) -> bool:
    return "{" in text or glob.has_magic(text)


def matching(pattern: str) -> list[Path]:
    """The tar files that match a pattern; each file that braces spell out must exist."""
    tars: list[Path] = []
    for text in _without_braces(pattern):
        tars += map(Path, sorted(glob.glob(text, recursive=True)) if glob.has_magic(text) else [text])
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
    choices = braces[1].split(",")
    if span := re.fullmatch(r"(\d+)\.\.(\d+)", braces[1]):
        choices = [str(value).zfill(len(span[1])) for value in range(int(span[1]), int(span[2]) + 1)]
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    return [text for choice in choices for text in _without_braces(before + choice + after)]


def _in_folder(root: Path) -> list[Picture]:
    """The pictures of a folder; without any, those in its tar files."""
    pictures, tars = [], []
    seen: set[str] = set()  # a link to a parent folder would never end
    for folder, below, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = [name for name in below if not name.startswith(".")]
        for path in (Path(folder) / name for name in files):
            relative = path.relative_to(root)
            if path.suffix == ".tar" and not path.name.startswith("."):
                tars.append((path, f"{relative.as_posix()}/"))
            if path.is_file() and is_picture(path):
                pictures.append(Picture(str(path), relative.as_posix(), relative.parent.name or None))
    return pictures or [picture for path, prefix in tars for picture in _in_tar(path, prefix)]


# Tar files: packed class folders, or webdataset shards with the class of id.jpg in id.cls or id.json.


def _in_tar(path: Path, prefix: str = "") -> list[Picture]:
    """The pictures of a tar file, ``prefix`` before their names. They are read by offset, so any process can read any.

    The label is the class beside the picture; in a tar without such files, the name of its folder.
    """
    members = members_of(path)
    pictures = [member for member in members if is_picture(PurePosixPath(member.name))]
    labels = _labels(path, members, {_stem(picture.name) for picture in pictures})
    labelled = []
    for picture in pictures:
        folder, slash, file = picture.name.rpartition("/")
        key = folder + slash + file.partition(".")[0]  # webdataset groups members by this
        if not labels:
            label = PurePosixPath(picture.name).parent.name or None
        elif _stem(picture.name) not in labels and key in labels:
            continue  # key.mask.png beside a labelled key.jpg: part of the same sample, but not its picture
        else:
            label = labels.get(_stem(picture.name))
        labelled.append(Picture(str(path), prefix + picture.name, label, picture.offset_data, picture.size))
    return labelled


def members_of(path: Path) -> list[tarfile.TarInfo]:
    """The files of an uncompressed tar; a compressed one has no offsets to read from."""
    try:
        with tarfile.open(path, "r:") as archive:
            members = [member for member in archive if member.isfile()]
            end = archive.offset
    except tarfile.TarError as error:
        raise LeanconvError(
            f"{str(path)!r} cannot be read as an uncompressed tar ({error}); unpack it, or pack it again with "
            "'tar -cf'."
        ) from None
    with path.open("rb") as file:
        file.seek(end)
        block = file.read(tarfile.BLOCKSIZE)
    if block.strip(b"\0"):  # neither a member nor the end of the archive
        raise LeanconvError(f"{str(path)!r} is damaged or cut short at byte {end}; copy or pack it again.")
    return members


def _stem(name: str) -> str:
    return posixpath.splitext(name)[0]


def _labels(path: Path, members: Sequence[tarfile.TarInfo], stems: set[str]) -> dict[str, str]:
    """Stem of a picture -> its class; ``.cls`` counts before ``.json``."""
    labels: dict[str, str] = {}
    with path.open("rb") as file:
        for suffix, read in ((".cls", _text_label), (".json", _json_label)):
            for member in members:
                stem, ending = posixpath.splitext(member.name)
                if ending != suffix or stem not in stems or stem in labels:
                    continue
                file.seek(member.offset_data)
                try:
                    label = read(file.read(member.size))
                except ValueError as error:
                    raise LeanconvError(
                        f"{member.name!r} in {str(path)!r} gives no class ({error}); pack the shard again."
                    ) from None
                if label is not None:
                    labels[stem] = label
    return labels


def _text_label(data: bytes) -> str:
    text = data.decode().strip()
    if not text:
        raise ValueError("it is empty")
    return _plain(text)


def _json_label(data: bytes) -> str | None:
    fields = json.loads(data)
    values = [fields[key] for key in JSON_KEYS if key in fields] if isinstance(fields, dict) else []
    usable = [value for value in values if isinstance(value, int | str) and not isinstance(value, bool)]
    return _plain(str(usable[0])) if usable else None


def _plain(text: str) -> str:
    """``007`` and ``7`` are one class."""
    return str(int(text)) if text.isascii() and text.isdecimal() else text
