"""Figures kept beside a saved result: what ``bench`` and ``evaluate`` measured, as they print it for machines.

They lie in the result's folder and are no part of it: its checksum does not cover them and ``load`` does not read them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from leanconv.errors import LeanconvError
from leanconv.system.atomic_files import write_whole

Record = Literal["bench", "evaluation"]
# The command that writes a record again.
_COMMANDS: dict[Record, str] = {"bench": "bench", "evaluation": "evaluate"}


def write_record(folder: Path, name: Record, data: dict[str, Any]) -> Path:
    """Write ``data`` to ``folder``/``name``.json in place of what was there, whole or not at all."""
    path = _path(folder, name)
    try:
        write_whole(path, json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise LeanconvError(f"cannot write {str(path)!r}: {error.strerror}; nothing was changed.") from error
    return path


def read_record(folder: Path, name: Record) -> dict[str, Any] | None:
    """What was recorded last, or None where nothing was."""
    path = _path(folder, name)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError, RecursionError) as error:
        raise _damaged(path, name, " ".join(str(error).split())) from None
    if not isinstance(data, dict):
        raise _damaged(path, name, "it holds no JSON object")
    return data


def check_recordable(folder: Path) -> None:
    """Refuse a folder that cannot take a record, before anything is measured for it."""
    if not os.access(folder, os.W_OK):
        raise LeanconvError(f"--record cannot write into {str(folder)!r}; make it writable or leave --record out.")


def _path(folder: Path, name: Record) -> Path:
    return folder / f"{name}.json"


def _damaged(path: Path, name: Record, why: str) -> LeanconvError:
    return LeanconvError(
        f"{str(path)!r} is damaged ({why}); remove it, or write it again with leanconv {_COMMANDS[name]} --record."
    )
