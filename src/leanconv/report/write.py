"""The page as a file, which appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

from leanconv.errors import LeanconvError
from leanconv.report.facts import facts_of
from leanconv.report.page import MARK, page, plotly_js
from leanconv.system.atomic_files import cannot_write, check_name, check_parent, folders_of, is_taken, write_whole

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
    try:
        with folders_of(path):
            write_whole(path, text)
    except OSError as error:
        raise cannot_write(path, error, "nothing was changed") from error


def check_report(path: Path) -> None:
    """Refuse, before any work is done for it, a place that cannot take a report or a machine that cannot draw one."""
    check_place(path, MARK, "report")


def check_place(path: Path, mark: str, what: str) -> None:
    """The same for any page: of files that are there only those with its ``mark`` are replaced."""
    check_name(path, "file", 150)
    taken = is_taken(path)
    if taken and path.is_dir():
        raise LeanconvError(f"--out {str(path)!r} is a folder; give the name of a file, such as report.html.")
    if taken and not _is_marked(path, mark):
        raise LeanconvError(f"{str(path)!r} exists and is no {what} of leanconv; choose another name or remove it.")
    check_parent(path)
    plotly_js()


def _is_marked(path: Path, mark: str) -> bool:
    try:
        with path.open("rb") as file:
            return mark.encode() in file.read(200)
    except OSError:
        return False
