"""``leanconv compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leanconv.cli import common as given
from leanconv.cli.json_output import print_json


def compare(
    folders: Annotated[list[Path], typer.Argument(help="Saved folders, as accelerate --out writes them.")],
    plot: Annotated[
        Path | None,
        typer.Option(help="Also write one HTML page: accuracy against MACs and against milliseconds."),
    ] = None,
    as_json: given.Json = False,
) -> None:
    """Show several saved networks beside one another: cost, errors, and the accuracy and times that were recorded.

    leanconv evaluate --record and leanconv bench --record record them.

    Examples:

    leanconv compare vgg16-3x vgg16-4x vgg16-5x

    leanconv compare vgg16-3x vgg16-4x --plot vgg16.html
    """
    from leanconv.report.compare import compare as read
    from leanconv.report.compare.page import check_page, write_page
    from leanconv.report.compare.text import as_text

    if plot is not None:
        check_page(plot)
    found = read(folders)
    if plot is not None:
        write_page(found, plot)
    if as_json:
        print_json({**found.to_json(), "plot": None if plot is None else str(plot)})
        return
    print(as_text(found))
    if plot is not None:
        print(f"\n{plot}: {plot.stat().st_size / 1e6:.1f} MB, open it in a browser")
