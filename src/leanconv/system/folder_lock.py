"""A folder one process has to itself."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from leanconv.errors import LeanconvError


def lock_folder(folder: Path) -> int:
    """A descriptor that holds the lock; the system lets it go when it is closed or the process ends."""
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
