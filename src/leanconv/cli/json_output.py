"""What a command prints for machines: one JSON object and nothing else."""

from __future__ import annotations

import contextlib
import io
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


def quietly(on: bool) -> contextlib.AbstractContextManager[object]:
    """With ``on``, nothing is written to stderr, neither warnings nor the progress of a download; errors are raised."""
    return contextlib.redirect_stderr(io.StringIO()) if on else contextlib.nullcontext()


def print_json(data: Any) -> None:
    print(json.dumps(data), file=_stdout, flush=True)
