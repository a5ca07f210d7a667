"""One parameter of a command for several options on the command line."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer

from leanconv.system.fields import NO_DEFAULT, options


@dataclasses.dataclass(frozen=True)
class OptionsOf:
    """``Annotated[dict[str, Any], OptionsOf(config)]``: the values of all options of a config, without ``skip``."""

    config: type
    skip: Collection[str] = ()

    def parameters(self) -> list[inspect.Parameter]:
        """As typer reads them. Limits are checked by the config itself, with its own errors."""
        made = []
        for option in options(self.config):
            if option.name not in self.skip:
                kind = str if typing.get_origin(option.type) is typing.Literal else option.type
                shown = typer.Option(*([option.flag] if option.flag else []), help=option.help)
                annotation: Any = Annotated[kind if option.default is not None else kind | None, shown]
                default = inspect.Parameter.empty if option.default is NO_DEFAULT else option.default
                made.append(_parameter(option.name, default, annotation))
        return made


def help_of(config: type, name: str) -> str:
    """The help of one option, for a command that spells it in another way."""
    return next(option.help for option in options(config) if option.name == name)


def with_single_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command for typer: a parameter that is a dataclass, or has ``OptionsOf``, becomes one option a field."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    hints = typing.get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        hint = _annotated(hints[name])
        single, make = _single_options(hint)
        if single:
            groups[name] = make, [option.name for option in single]
        parameters += single or [_parameter(name, parameter.default, hint)]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, (make, names) in groups.items():
            values[name] = make(**{option: values.pop(option) for option in names})
        command(**values)

    changed: Any = run
    changed.__signature__ = inspect.Signature(parameters, return_annotation=None)
    changed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _annotated(hint: Any) -> Any:
    """Python 3.10 adds None to the type of a parameter whose default is None: typer reads what is inside."""
    if typing.get_origin(hint) is typing.Union:
        return next((part for part in typing.get_args(hint) if typing.get_origin(part) is Annotated), hint)
    return hint


def _single_options(hint: Any) -> tuple[list[inspect.Parameter], Callable[..., Any]]:
    """The options that a type stands for, and what makes its value of theirs; none for an ordinary type."""
    for extra in typing.get_args(hint):
        if isinstance(extra, OptionsOf):
            return extra.parameters(), dict
    if not dataclasses.is_dataclass(hint):
        return [], dict
    hints = typing.get_type_hints(hint, include_extras=True)
    fields = dataclasses.fields(hint)
    return [_parameter(field.name, field.default, hints[field.name]) for field in fields], hint  # type: ignore[return-value]


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
