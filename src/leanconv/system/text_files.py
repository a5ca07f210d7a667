"""A text file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write beside ``path`` and rename into it; where that fails, what was there before is still there."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with part.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
