"""What ``leanconv --help`` and ``leanconv COMMAND --help`` print."""

from __future__ import annotations

from typer.main import get_command
from typer.testing import CliRunner

from leanconv.cli.main import app

PLAIN = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "FORCE_COLOR": None}


def commands() -> list[str]:
    return sorted(get_command(app).commands)  # type: ignore[attr-defined]


def help_texts() -> dict[str, str]:
    """By command; "leanconv" is the whole."""
    return {"leanconv": _help(), **{name: _help(name) for name in commands()}}


def _help(*command: str) -> str:
    result = CliRunner().invoke(app, [*command, "--help"], env=PLAIN, prog_name="leanconv")
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.output.splitlines()) + "\n"
