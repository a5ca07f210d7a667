"""Tar files of pictures: class folders packed as they are, or webdataset shards with the class beside the picture."""

from __future__ import annotations

import json
import posixpath
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from leanconv.errors import LeanconvError
from leanconv.images.picture import Picture, is_picture

# Where a shard's ``key.json`` may say the class.
JSON_KEYS = ("label", "cls", "class")


def pictures_in_tar(path: Path, prefix: str = "") -> list[Picture]:
    """Members are read by their offset, so any worker can read any of them. ``prefix`` goes before their names.

    Where ``key.cls`` or ``key.json`` gives the class of ``key.jpg``, that is its label, else the folder it lies in.
    """
    members = members_of(path)
    pictures = [member for member in members if is_picture(PurePosixPath(member.name))]
    labels = _labels(path, members, {_stem(picture.name) for picture in pictures})
    labelled = []
    for picture in pictures:
        stem = _stem(picture.name)
        if not labels:
            label = PurePosixPath(picture.name).parent.name or None
        elif stem not in labels and _key(picture.name) in labels:
            continue  # key.mask.png beside a labelled key.jpg: of the same sample, but not its picture
        else:
            label = labels.get(stem)
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
    if block.strip(b"\0"):  # reading stopped at something that is neither a member nor the end
        raise LeanconvError(f"{str(path)!r} is damaged or cut short at byte {end}; copy or pack it again.")
    return members


def _stem(name: str) -> str:
    return posixpath.splitext(name)[0]


def _key(name: str) -> str:
    """What webdataset groups members by: everything before the first dot of the file's name."""
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


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
