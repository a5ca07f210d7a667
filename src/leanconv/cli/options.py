"""Options of a command, made from the fields of a config."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Any, TypeVar

import typer

from leanconv.system.fields import NO_DEFAULT, options

Command = TypeVar("Command", bound=Callable[..., None])


def options_of(config: type, skip: Collection[str] = ()) -> list[inspect.Parameter]:
    """A parameter for each option of a config, without those to ``skip``, as typer reads them. Limits are checked by
    the config itself, in its own words."""
    parameters = []
    for option in options(config):
        if option.name in skip:
            continue
        kind = str if typing.get_origin(option.type) is typing.Literal else option.type
        default = inspect.Parameter.empty if option.default is NO_DEFAULT else option.default
        shown = typer.Option(*([option.flag] if option.flag else []), help=option.help)
        annotation: Any = Annotated[kind if default is not None else kind | None, shown]
        parameters.append(
            inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    return parameters


def help_of(config: type, name: str) -> str:
    """What one option means, for a command that spells it in another way."""
    return next(option.help for option in options(config) if option.name == name)


def with_options_of(config: type, before: str, skip: Collection[str] = ()) -> Callable[[Command], Command]:
    """The command with the options of a config in place of its ``**arguments``, shown before its option ``before``."""

    def decorate(command: Command) -> Command:
        hints = typing.get_type_hints(command, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(command).parameters.items():
            if name == before:
                parameters += options_of(config, skip)
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
        changed: Any = command
        changed.__signature__ = inspect.Signature(parameters, return_annotation=None)
        changed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate
