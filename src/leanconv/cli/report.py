"""``leanconv report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leanconv.cli import common as given
from leanconv.cli.json_output import print_json


def report(
    folder: Annotated[Path, typer.Argument(help="A saved folder, as accelerate --out writes it.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write; an earlier report is replaced. Default: FOLDER/report.html.")
    ] = None,
    as_json: given.Json = False,
) -> None:
    """Write one self-contained HTML page about a saved network: what was done to it, what it cost, what to try next.

    What leanconv bench --record and leanconv evaluate --record measured is part of it.

    Examples:

    leanconv report vgg16-4x

    leanconv report vgg16-4x --out vgg16-4x.html
    """
    from leanconv.report import write_report

    path = write_report(folder, out)
    if as_json:
        print_json({"report": str(path), "bytes": path.stat().st_size})
    else:
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, open it in a browser")
