"""``leanconv compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leanconv.cli import common
from leanconv.errors import LeanconvError


def compare(
    folders: common.Folders,
    plot: Annotated[
        Path | None, typer.Option(help="Also write one HTML page, as leanconv report does for several folders.")
    ] = None,
    as_json: common.Json = False,
) -> None:
    """Show several saved networks side by side: cost, errors, and the accuracy and times that were recorded.

    leanconv evaluate --record and leanconv bench --record record them.

    Examples:

    leanconv compare vgg16-3x vgg16-4x vgg16-5x

    leanconv compare vgg16-3x vgg16-4x --plot vgg16.html
    """
    from leanconv.report import check_page, write_comparison
    from leanconv.report.advice import evaluate_like
    from leanconv.report.comparison import compare as read

    if plot is not None:
        if plot.suffix != ".html" or plot.is_dir():
            raise LeanconvError(f"--plot {str(plot)!r} must be a file whose name ends in .html.")
        check_page(plot, "comparison")
    comparison = read(folders)
    if plot is not None:
        if not any(result.accuracy for result in comparison.results):
            command = evaluate_like(comparison.results[0], comparison.results)
            raise LeanconvError(f"there is nothing to plot, as no accuracy is recorded; record it: {command}")
        write_comparison(comparison, plot)
    if as_json:
        common.print_json({**comparison.to_json(), "plot": None if plot is None else str(plot)})
        return
    print(comparison)
    if plot is not None:
        print(f"\n{plot}: {plot.stat().st_size / 1e6:.1f} MB, open it in a browser")
