"""``leanconv demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leanconv.cli import common
from leanconv.system.threads import Threads, spin_little


def demo(
    out: Annotated[Path | None, typer.Option(help="Keep the accelerated network in this new folder.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the page about it to this file, such as demo.html.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training digits.")] = 6,
    threads: common.Threads = None,
    as_json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Train a small network on scikit-learn's digits, accelerate it in seven ways, and time it. Offline.

    Example: leanconv demo --out digits-4x --report digits-4x.html
    """
    spin_little()
    from leanconv.demo import run_demo

    with Threads(threads).held():  # the training too
        common.show(run_demo(out=out, report=report, epochs=epochs, threads=threads, quiet=quiet), as_json)
