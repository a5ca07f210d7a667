"""Options of a command that are made from a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer
from typer.testing import CliRunner

from leanconv.cli.options import options_of, with_options_of
from leanconv.system.fields import check_fields, option


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = option(None, "Steps of training.", at_least=1)
    way: Literal["near", "far"] = option("near", "Which way.")
    share: float = option(0.5, "A share.", flag="--part")
    hidden: bool = option(False, "Nobody needs it.")

    def __post_init__(self) -> None:
        check_fields(self)


def test_a_command_takes_the_options_of_a_config() -> None:
    seen: dict[str, Any] = {}

    @with_options_of(Config, before="quiet", skip=("hidden",))
    def command(name: Annotated[str, typer.Argument()], quiet: bool = False, **options: Any) -> None:
        seen.update(name=name, quiet=quiet, config=Config(**options))

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, ["here", "--steps", "3", "--way", "far", "--part", "0.25"])
    assert result.exit_code == 0, result.output
    assert seen == {"name": "here", "quiet": False, "config": Config(steps=3, way="far", share=0.25)}
    assert CliRunner().invoke(app, ["here"]).exit_code == 0
    assert seen["config"] == Config()
    shown = CliRunner().invoke(app, ["--help"]).output
    places = [shown.index(word) for word in ("--steps", "--way", "--part", "--quiet")]
    assert places == sorted(places)
    assert "Steps of training." in shown
    assert "hidden" not in shown


def test_none_is_allowed_where_it_is_the_default() -> None:
    steps, way, share, _ = options_of(Config)
    assert [parameter.default for parameter in (steps, way, share)] == [None, "near", 0.5]
    assert steps.annotation.__origin__ == int | None
    assert way.annotation.__origin__ is str
