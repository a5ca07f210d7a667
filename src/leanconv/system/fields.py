"""Options as dataclass fields. Each field says what it means and what is allowed: checks, the command line's options
and the tables of the documentation are made from that.

    @dataclass(frozen=True, kw_only=True)
    class Config:
        steps: int = option(10, "Steps of training.", at_least=1)
        optimizer: Optimizer = option("sgd", "Which optimizer.")  # Optimizer = Literal["sgd", "adam"]

        def __post_init__(self) -> None:
            check_fields(self)
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from leanconv.errors import LeanconvError, listing, whole

_KEY = "leanconv option"
NO_DEFAULT: Any = dataclasses.MISSING


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """What one field says of itself. ``type``: without None, which is allowed where it is the default."""

    name: str
    type: Any
    default: Any
    help: str
    at_least: float | None
    above: float | None
    at_most: float | None
    under: float | None
    choices: tuple[str, ...]
    also: str
    flag: str | None
    check: Callable[[str, Any], Any] | None

    @property
    def limits(self) -> str:
        """For people: "at least 1", or "sgd, adam"; empty without any."""
        if self.choices:
            return f"{', '.join(self.choices)}{f' {self.also}' if self.also else ''}"
        return _bounds(self.at_least, self.above, self.at_most, self.under)

    def checked(self, value: Any) -> Any:
        """``value`` in the field's type; LeanconvError where it is not allowed."""
        if value is None and self.default is None:
            return None
        if self.check is not None:
            return self.check(self.name, value)
        if self.choices:
            return one_of(self.name, value, self.choices, self.also)
        if self.type is bool:
            return bool(value)
        if self.type is int:
            number = whole(self.name, value, int(self.at_least or 0))
            if self.at_most is None or number <= self.at_most:
                return number
        if self.type in (int, float):
            return number_in(
                self.name, value, at_least=self.at_least, above=self.above, at_most=self.at_most, under=self.under
            )
        return value


def option(
    default: Any = NO_DEFAULT,
    help: str = "",
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    under: float | None = None,
    choices: Sequence[str] | None = None,
    also: str = "",
    flag: str | None = None,
    check: Callable[[str, Any], Any] | None = None,
) -> Any:
    """A dataclass field with its meaning and limits.

    ``choices``: words; a field annotated with a Literal has those by itself. ``also``: what else is allowed, for the
    error's sentence ("or a dict ..."); needs a ``check`` that accepts it. ``flag``: the option on the command line
    where it is not --name. ``check``: a function (name, value) -> value in place of the rules here.
    """
    said = {
        "help": help,
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "under": under,
        "choices": None if choices is None else tuple(choices),
        "also": also,
        "flag": flag,
        "check": check,
    }
    return dataclasses.field(default=default, metadata={_KEY: said})


def options(config: type) -> tuple[Option, ...]:
    """The fields of a dataclass that were made by ``option``, in order. Types in its annotations must be imported when
    it runs, not under TYPE_CHECKING only."""
    hints = typing.get_type_hints(config)
    made = []
    for field in dataclasses.fields(config):
        if _KEY in field.metadata:
            said = dict(field.metadata[_KEY])
            kind = _without_none(hints[field.name])
            words = said.pop("choices")
            if words is None:
                words = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
            made.append(Option(name=field.name, type=kind, default=field.default, choices=words, **said))
    return tuple(made)


def check_fields(config: Any) -> None:
    """Check every option of a dataclass, a frozen one too; call it in ``__post_init__``."""
    for each in options(type(config)):
        object.__setattr__(config, each.name, each.checked(getattr(config, each.name)))


def table_of(config: type) -> str:
    """The options as a Markdown table."""
    rows = ["| option | default | allowed | meaning |", "|---|---|---|---|"]
    for each in options(config):
        default = "" if each.default is NO_DEFAULT else f"`{each.default}`"
        rows.append(f"| `{each.name}` | {default} | {each.limits} | {each.help} |")
    return "\n".join(rows)


def one_of(name: str, value: Any, allowed: Sequence[str], also: str = "") -> str:
    """``value`` if it is one of these words; else refused."""
    if not isinstance(value, str) or value not in allowed:
        words = listing([repr(item) for item in allowed]) + (f" {also}" if also else "")
        raise LeanconvError(f"{name}={value!r} is not known; use {words}.")
    return value


def number_in(
    name: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    under: float | None = None,
) -> float:
    """``value`` as a float if it is a finite number within these bounds; else refused."""
    good = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if not (
        good
        and (at_least is None or value >= at_least)
        and (above is None or value > above)
        and (at_most is None or value <= at_most)
        and (under is None or value < under)
    ):
        raise LeanconvError(f"{name}={value!r} must be a number {_bounds(at_least, above, at_most, under)}.")
    return float(value)


def _bounds(at_least: float | None, above: float | None, at_most: float | None, under: float | None) -> str:
    named = (("at least", at_least), ("above", above), ("at most", at_most), ("under", under))
    return " and ".join(f"{word} {value:g}" for word, value in named if value is not None)


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    rest = [part for part in typing.get_args(hint) if part is not type(None)]
    return rest[0] if len(rest) == 1 else typing.Union[tuple(rest)]  # noqa: UP007
