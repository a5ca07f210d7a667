"""Where an exported file goes, and that it appears there whole or not at all, once it is checked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from leanconv.errors import LeanconvError
from leanconv.system.atomic_files import cannot_write, check_absent, check_name, check_parent, part_beside

SUFFIXES = {"onnx": ".onnx", "pt2": ".pt2", "aot": ".pt2"}


def check_place(path: Path, kind: str) -> None:
    """Refuse a place that cannot take a new file of this format, before any work is done for it."""
    if path.suffix != SUFFIXES[kind]:
        raise LeanconvError(
            f"{str(path)!r} does not end in {SUFFIXES[kind]}, as a file of the format {kind} does; change the name."
        )
    check_name(path, "file")
    check_absent(path)
    check_parent(path)


@contextlib.contextmanager
def new_file(path: Path, kind: str) -> Iterator[Path]:
    """Where to write. What lies there at the end is moved to ``path`` and beside it; on an error all of it is gone."""
    check_place(path, kind)
    try:
        with part_beside(path) as part:
            yield part / path.name
            _move(part, path)
    except OSError as error:
        raise cannot_write(path, error) from error


def _move(part: Path, path: Path) -> None:
    # The file itself last: whoever waits for it finds what it refers to.
    files = sorted(part.iterdir(), key=lambda file: file.name == path.name)
    for file in files:
        check_absent(path.with_name(file.name))
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    for file in files:
        os.rename(file, path.with_name(file.name))
