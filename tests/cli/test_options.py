"""Options of a command that are made from a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer
from typer.testing import CliRunner

from leanconv.cli.options import OptionsOf, with_single_options
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

    def command(
        name: Annotated[str, typer.Argument()],
        *,
        options: Annotated[dict[str, Any], OptionsOf(Config, skip=("hidden",))],
        quiet: bool = False,
    ) -> None:
        seen.update(name=name, quiet=quiet, config=Config(**options))

    app = typer.Typer()
    app.command()(with_single_options(command))
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


@dataclass(frozen=True, kw_only=True)
class Size:
    width: Annotated[int, typer.Option(min=1, help="In pixels.")] = 4
    height: Annotated[int | None, typer.Option("--tall")] = None


def test_a_dataclass_stands_for_its_fields() -> None:
    seen: list[Size] = []

    def command(*, size: Size) -> None:
        seen.append(size)

    app = typer.Typer()
    app.command()(with_single_options(command))
    assert CliRunner().invoke(app, ["--tall", "3"]).exit_code == 0
    assert seen == [Size(height=3)]
    assert CliRunner().invoke(app, ["--width", "0"]).exit_code == 2


def test_none_is_allowed_where_it_is_the_default() -> None:
    steps, way, share, _ = OptionsOf(Config).parameters()
    assert [parameter.default for parameter in (steps, way, share)] == [None, "near", 0.5]
    assert steps.annotation.__origin__ == int | None
    assert way.annotation.__origin__ is str
