"""What a command prints for machines: one JSON object and nothing else."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def only_json(on: bool) -> Iterator[None]:
    """With ``on``, whatever else is printed (by a download, by the user's own file) goes to stderr."""
    global _stdout
    _stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if on else contextlib.nullcontext():
        yield


_stdout = sys.stdout


def print_json(data: Any) -> None:
    print(json.dumps(data), file=_stdout, flush=True)
