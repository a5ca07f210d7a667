"""``leanconv doctor``."""

from __future__ import annotations

import sys

import typer

from leanconv.cli import common as given
from leanconv.cli.json_output import print_json


def doctor(as_json: given.Json = False) -> None:
    """Show versions, devices and runtimes found here, and what is missing for what.

    Exits 2 where something is broken that leanconv cannot do without.

    Example: leanconv doctor
    """
    from leanconv.cli.doctor_checks import examine

    found = examine()
    if as_json:
        print_json(found.to_json())
    else:
        print(found)
    if found.broken:
        print(f"leanconv: error: {'; '.join(found.broken)}; install it again.", file=sys.stderr)
        raise typer.Exit(2)
