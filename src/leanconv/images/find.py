"""Where the pictures are: a folder, with or without class folders, a picture, or a tar file of pictures."""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from leanconv.errors import LeanconvError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")


@dataclass(frozen=True)
class Picture:
    """One encoded picture: a whole file, or ``size`` bytes of a tar file from ``offset``.

    ``label`` is the name of the folder it lies in, or None where that says nothing of a class.
    """

    path: str
    name: str
    label: str | None
    offset: int = 0
    size: int | None = None

    def read(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read() if self.size is None else file.read(self.size)


def find_pictures(path: str | Path) -> list[Picture]:
    """Every picture under ``path``, in order of name. Hidden files are passed over."""
    place = Path(path)
    if not place.exists():
        raise LeanconvError(f"{str(place)!r} does not exist; give a folder of images or a .tar file.")
    if place.is_dir():
        found = _in_folder(place)
    elif tarfile.is_tarfile(place):
        found = _in_tar(place)
    elif place.suffix.lower() in SUFFIXES:
        found = [Picture(str(place), place.name, None)]
    else:
        raise LeanconvError(f"{str(place)!r} is neither a folder, a .tar file nor an image.")
    if not found:
        raise LeanconvError(f"no images in {str(place)!r}; looked for {' '.join(SUFFIXES)}.")
    return sorted(found, key=lambda picture: picture.name)


def _is_picture(path: PurePosixPath | Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def _in_folder(root: Path) -> list[Picture]:
    found = []
    seen: set[str] = set()  # a link to a folder above would go round for ever
    for folder, below, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        below[:] = [] if real in seen else [name for name in below if not name.startswith(".")]
        for path in [] if real in seen else [Path(folder) / name for name in files]:
            if not (path.is_file() and _is_picture(path)):
                continue
            relative = path.relative_to(root)
            found.append(Picture(str(path), relative.as_posix(), relative.parent.name or None))
        seen.add(real)
    return found


def _in_tar(path: Path) -> list[Picture]:
    """Members are read by their offset, so any worker can read any of them; a compressed tar has no offsets."""
    try:
        with tarfile.open(path, "r:") as archive:
            members = [member for member in archive if member.isfile() and _is_picture(PurePosixPath(member.name))]
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
    found = []
    for member in members:
        label = PurePosixPath(member.name).parent.name or None
        found.append(Picture(str(path), member.name, label, member.offset_data, member.size))
    return found
