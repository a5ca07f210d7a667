"""Files and folders that appear whole or not at all: written under another name beside their place, then renamed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leanconv.errors import LeanconvError

# The end of the name of a folder that is being written.
PART = ".leanconv-part"
# Names of those this process is writing, each drawn once: it does not matter by which path. A process's number alone
# does not say whether it still writes, as an earlier one may have had the same.
_writing: set[str] = set()


def check_name(path: Path, what: str, longest: int = 190) -> None:
    """``longest``: bytes, with room for what is added to it while it is written."""
    if not path.name or len(os.fsencode(path.name)) > longest or "\0" in str(path):
        raise LeanconvError(f"{str(path)[:80]!r} cannot be the name of a {what}; give a shorter, plain one.")


def is_taken(path: Path) -> bool:
    """Whether something has this name, a link that leads nowhere included; a place one cannot look at is refused."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise cannot_write(path, error) from error
    return True


def check_absent(path: Path) -> None:
    if is_taken(path):
        raise exists_already(path)


def check_parent(path: Path) -> None:
    """Refuse a path none of whose folders can be written to."""
    parent = next(place for place in path.absolute().parents if os.path.lexists(place))
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise LeanconvError(f"cannot write {str(path)!r}: {str(parent)!r} is not a folder you may write to.")


def exists_already(path: Path) -> LeanconvError:
    return LeanconvError(f"{str(path)!r} exists already; choose another name or remove it first.")


def cannot_write(path: Path, error: Exception, kept: str = "nothing was left behind") -> LeanconvError:
    said = getattr(error, "strerror", None) or str(error)
    return LeanconvError(f"cannot write {str(path)!r}: {said}; {kept}, choose another place.")


@contextmanager
def folders_of(path: Path) -> Iterator[None]:
    """Make the folders ``path`` lies in; after an error those that were made are gone again."""
    made = [place for place in path.absolute().parents if not place.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for place in made:
            with contextlib.suppress(OSError):  # another process may have put something there meanwhile
                place.rmdir()
        raise


@contextmanager
def replaced(path: Path, part: Path | None = None) -> Iterator[Path]:
    """Where to write the new ``path``, which it becomes when the block ends. After an error what was there before is
    still there. ``part``: that place, in the same folder; default: a name of its own."""
    part = part or path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield part
        flush(part)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """A text file, new or in place of the one that is there."""
    with replaced(path) as part:
        part.write_text(text, encoding="utf-8")


def flush(path: Path) -> None:
    """Wait until a file, or a folder and its files, is on the disk."""
    for item in [*path.iterdir(), path] if path.is_dir() else [path]:
        handle = os.open(item, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def part_beside(path: Path) -> Iterator[Path]:
    """A new folder beside ``path`` to write in. What is in it at the end is to be moved from there: it is removed."""
    _clear_leftovers(path)
    part = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex}{PART}")
    _writing.add(part.name)
    try:
        with folders_of(path):
            try:
                part.mkdir()
                yield part
            finally:
                shutil.rmtree(part, ignore_errors=True)
    finally:
        _writing.discard(part.name)


def _clear_leftovers(path: Path) -> None:
    """Remove what killed processes left of the same path."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.(\d{{1,7}})-[0-9a-f]{{32}}{re.escape(PART)}")
    for left in path.parent.glob(f".*{PART}"):
        found = ours.fullmatch(left.name)
        if found is None or left.name in _writing:
            continue
        # The same number as ours is an earlier process that had it, as in a container started again.
        if int(found[1]) == os.getpid() or not _alive(int(found[1])):
            shutil.rmtree(left, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
