"""One encoded picture, wherever it lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")


@dataclass(frozen=True)
class Picture:
    """A whole file, or ``size`` bytes of a tar file from ``offset``.

    ``label`` is the class its data gives it: the name of the folder it lies in, or the class index written beside it;
    None where nothing says so.
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


def is_picture(path: PurePath) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
