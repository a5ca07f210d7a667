"""A file that appears whole or not at all: written in a folder beside its place and moved once it is checked."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from leanconv.errors import LeanconvError

SUFFIXES = {"onnx": ".onnx", "pt2": ".pt2", "aot": ".pt2"}
# The end of the name of a folder that is being written.
PART = ".leanconv-part"


def check_place(path: Path, kind: str) -> None:
    """Refuse a place that cannot take a new file of this format, before any work is done for it."""
    if path.suffix != SUFFIXES[kind]:
        raise LeanconvError(
            f"{str(path)!r} does not end in {SUFFIXES[kind]}, as a file of the format {kind} does; change the name."
        )
    if len(os.fsencode(path.name)) > 200 or "\0" in str(path):
        raise LeanconvError(f"{str(path)[:80]!r} cannot be the name of a file; give a shorter, plain one.")
    if path.exists() or path.is_symlink():
        raise _exists(path)
    parent = next(place for place in path.absolute().parents if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise LeanconvError(f"cannot write {str(path)!r}: {str(parent)!r} is not a folder you may write to.")


@contextlib.contextmanager
def new_file(path: Path, kind: str) -> Iterator[Path]:
    """Where to write. What lies there at the end is moved to ``path`` and beside it; on an error all of it is gone."""
    check_place(path, kind)
    part = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex}{PART}")
    made = [place for place in path.absolute().parents if not place.exists()]
    try:
        part.mkdir(parents=True)
        yield part / path.name
        _move(part, path)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        for place in made:
            with contextlib.suppress(OSError):  # another process may have put something there meanwhile
                place.rmdir()
        if isinstance(error, OSError):
            raise LeanconvError(
                f"cannot write {str(path)!r}: {error.strerror or error}; nothing was left behind, choose another place."
            ) from error
        raise
    shutil.rmtree(part, ignore_errors=True)


def _move(part: Path, path: Path) -> None:
    # The file itself last: whoever waits for it finds what it refers to.
    files = sorted(part.iterdir(), key=lambda file: file.name == path.name)
    for file in files:
        if path.with_name(file.name).exists():
            raise _exists(path.with_name(file.name))
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    for file in files:
        os.rename(file, path.with_name(file.name))


def _exists(path: Path) -> LeanconvError:
    return LeanconvError(f"{str(path)!r} exists already; choose another name or remove it first.")
