"""Files and folders that appear whole or not at all: written under another name beside their place, then renamed; and
a lock for folders that only one process may use."""

from __future__ import annotations

import contextlib
import fcntl
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
# Random names of those this process is writing. Its process number alone is not enough: an earlier process may have had
# the same one.
_writing: set[str] = set()


def check_name(path: Path, what: str, longest: int = 190) -> None:
    """``longest``: bytes, which leaves room for what is added to the name while it is written."""
    if not path.name or len(os.fsencode(path.name)) > longest or "\0" in str(path):
        raise LeanconvError(f"{str(path)[:80]!r} cannot be the name of a {what}; give a shorter, plain one.")


def is_taken(path: Path) -> bool:
    """Whether this name exists, also as a broken link; refuses a path that cannot be read."""
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
    """Refuse a path where no folder or file can be made."""
    parent = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise LeanconvError(f"cannot write {str(path)!r}: {str(parent)!r} is not a folder you may write to.")


def exists_already(path: Path) -> LeanconvError:
    return LeanconvError(f"{str(path)!r} exists already; choose another name or remove it first.")


def cannot_write(path: Path, error: Exception, kept: str = "nothing was left behind") -> LeanconvError:
    reason = getattr(error, "strerror", None) or str(error)
    return LeanconvError(f"cannot write {str(path)!r}: {reason}; {kept}, choose another place.")


@contextmanager
def folders_of(path: Path) -> Iterator[None]:
    """Make the folders ``path`` lies in; after an error the new ones are removed again."""
    made = [folder for folder in path.absolute().parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in made:
            with contextlib.suppress(OSError):  # another process may have written something there meanwhile
                folder.rmdir()
        raise


@contextmanager
def replaced(path: Path, part: Path | None = None) -> Iterator[Path]:
    """The file to write in place of ``path``: it is renamed to ``path`` when the block ends. After an error the old
    file is still there. ``part``: its path, in the same folder; by default a new name."""
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
    """Wait until a file, or a folder with its files, is on the disk."""
    for item in [*path.iterdir(), path] if path.is_dir() else [path]:
        handle = os.open(item, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def part_beside(path: Path) -> Iterator[Path]:
    """A new folder beside ``path`` to write in. Move files out of it: at the end it is removed."""
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
    """Remove what killed processes left beside ``path``."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.(\d{{1,7}})-[0-9a-f]{{32}}{re.escape(PART)}")
    for left in path.parent.glob(f".*{PART}"):
        match = ours.fullmatch(left.name)
        if match is None or left.name in _writing:
            continue
        # An earlier process may have had our number, as in a container started again.
        if int(match[1]) == os.getpid() or not _alive(int(match[1])):
            shutil.rmtree(left, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    return True


def lock_folder(folder: Path) -> int:
    """Lock a folder for this process. Closing the descriptor or the end of the process releases the lock."""
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise LeanconvError(f"workdir={str(folder)!r} cannot be opened ({error.strerror}).") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise LeanconvError(
            f"workdir={str(folder)!r} is in use by another process; wait for it or give another folder."
        ) from None
    return lock
