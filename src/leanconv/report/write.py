"""The page as a file, which appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from leanconv.errors import LeanconvError
from leanconv.report.facts import facts_of
from leanconv.report.page import MARK, page, plotly_js
from leanconv.textfile import write_whole

REPORT = "report.html"


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a saved ``folder`` to ``out``, by default ``report.html`` inside it. A report that is there is
    replaced, any other file is not."""
    folder = Path(folder)
    path = folder / REPORT if out is None else Path(out)
    check_report(path)
    put(page(facts_of(folder)), path)
    return path


def put(text: str, path: Path) -> None:
    """Write ``text`` and the folders it needs; where that fails, none of them is left."""
    made = [place for place in path.absolute().parents if not place.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except BaseException as error:
        for place in made:
            with contextlib.suppress(OSError):  # another process may have put something there meanwhile
                place.rmdir()
        if isinstance(error, OSError):
            raise LeanconvError(
                f"cannot write {str(path)!r}: {error.strerror or error}; nothing was changed, choose another place."
            ) from error
        raise


def check_report(path: Path) -> None:
    """Refuse, before any work is done for it, a place that cannot take a report or a machine that cannot draw one."""
    check_place(path, MARK, "report")


def check_place(path: Path, mark: str, what: str) -> None:
    """The same for any page: of files that are there only those with its ``mark`` are replaced."""
    if not path.name or len(os.fsencode(path.name)) > 150 or "\0" in str(path):
        raise LeanconvError(f"{str(path)[:80]!r} cannot be the name of a file; give a shorter, plain one.")
    if path.is_dir():
        raise LeanconvError(f"--out {str(path)!r} is a folder; give the name of a file, such as report.html.")
    if path.exists() and not _is_marked(path, mark):
        raise LeanconvError(f"{str(path)!r} exists and is no {what} of leanconv; choose another name or remove it.")
    parent = next(place for place in path.absolute().parents if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise LeanconvError(f"cannot write {str(path)!r}: {str(parent)!r} is not a folder you may write to.")
    plotly_js()


def _is_marked(path: Path, mark: str) -> bool:
    try:
        with path.open("rb") as file:
            return mark.encode() in file.read(200)
    except OSError:
        return False
