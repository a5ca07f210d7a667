"""``leanconv report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leanconv.cli import common


def report(
    folders: common.Folders,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write; an earlier page of the same kind is replaced. Default: FOLDER/report.html, or "
            "comparison.html here for several folders."
        ),
    ] = None,
    as_json: common.Json = False,
) -> None:
    """Write one self-contained HTML page about a saved network: what was done to it, what it cost, what to try next.

    With several folders the page compares them. What leanconv bench --record and leanconv evaluate --record measured
    is part of it.

    Examples:

    leanconv report vgg16-4x

    leanconv report vgg16-4x --out vgg16-4x.html

    leanconv report vgg16-3x vgg16-4x vgg16-5x --out vgg16.html
    """
    from leanconv.report import COMPARISON, write_comparison, write_report
    from leanconv.report.comparison import compare

    if len(folders) == 1:
        path = write_report(folders[0], out)
    else:
        path = write_comparison(compare(folders), out or Path(COMPARISON))
    if as_json:
        common.print_json({"report": str(path), "bytes": path.stat().st_size})
    else:
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, open it in a browser")
