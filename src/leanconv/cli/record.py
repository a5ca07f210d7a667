"""``--record``: what a command measured, kept beside the saved network it was measured on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from leanconv.cli.networks import is_saved
from leanconv.errors import LeanconvError
from leanconv.storage.records import check_recordable

Record = Annotated[
    bool,
    typer.Option("--record", help="Keep the figures in the saved folder, for leanconv compare and leanconv report."),
]


def folder_to_record(specs: Sequence[str]) -> Path:
    """The saved folder, the last of ``specs``, behind its original network if that is there; else an error."""
    *before, folder = specs
    if not is_saved(folder) or any(is_saved(original) for original in before):
        raise LeanconvError(
            "--record keeps figures of a saved folder against its original; give the original network first and the "
            f"folder second, not {' '.join(specs)!r}."
        )
    from leanconv.storage.folder import read_description

    path = Path(folder)
    read_description(path)
    check_recordable(path)
    return path
