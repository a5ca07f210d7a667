"""Options as dataclass fields. Each field has its meaning and its limits: checks, the options of the command line and
the tables of the documentation come from them.

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
import operator
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from leanconv.errors import LeanconvError, listing, whole

_KEY = "leanconv option"
NO_DEFAULT: Any = dataclasses.MISSING

# By keyword: the words of an error message, and whether a number is within the limit.
_LIMITS: dict[str, tuple[str, Callable[[Any, float], bool]]] = {
    "at_least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "at_most": ("at most", operator.le),
    "under": ("under", operator.lt),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One field. ``type``: without None, which is allowed where it is the default. ``choices``: those of a Literal.
    ``bounds``: by the keywords of ``_LIMITS``; None is no limit."""

    name: str
    type: Any
    default: Any
    choices: tuple[str, ...]
    help: str
    bounds: dict[str, float | None]
    flag: str | None
    check: Callable[[str, Any], Any] | None

    @property
    def limits(self) -> str:
        """For people: "at least 1", or "sgd, adam"; empty without any."""
        return ", ".join(self.choices) or _described(self.bounds)

    def checked(self, value: Any) -> Any:
        """``value`` in the field's type; LeanconvError where it is not allowed."""
        if value is None and self.default is None:
            return None
        if self.check is not None:
            return self.check(self.name, value)
        if self.choices:
            return one_of(self.name, value, self.choices)
        if self.type is bool:
            return bool(value)
        if self.type is int:
            number = whole(self.name, value, int(self.bounds["at_least"] or 0))
            if self.bounds["at_most"] is None or number <= self.bounds["at_most"]:
                return number
        if self.type in (int, float):
            return number_in(self.name, value, **self.bounds)
        return value


def option(
    default: Any = NO_DEFAULT,
    help: str = "",
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    under: float | None = None,
    flag: str | None = None,
    check: Callable[[str, Any], Any] | None = None,
) -> Any:
    """A dataclass field with its meaning and limits; the words of a Literal are its choices.

    ``flag``: the option on the command line where it is not --name. ``check``: a function (name, value) -> value that
    replaces the rules here.
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most, "under": under}
    return dataclasses.field(
        default=default, metadata={_KEY: {"help": help, "bounds": bounds, "flag": flag, "check": check}}
    )


def options(config: type) -> tuple[Option, ...]:
    """The fields of a dataclass that were made by ``option``, in order. Types in its annotations must be imported when
    it runs, not under TYPE_CHECKING only."""
    fields = [field for field in dataclasses.fields(config) if _KEY in field.metadata]
    # Of these fields alone: Python 3.10 refuses an InitVar, which a config may have besides.
    annotated = type(config.__name__, (), {"__annotations__": {field.name: field.type for field in fields}})
    hints = typing.get_type_hints(annotated, vars(sys.modules[config.__module__]))
    made = []
    for field in fields:
        kind = _without_none(hints[field.name])
        choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
        made.append(Option(name=field.name, type=kind, default=field.default, choices=choices, **field.metadata[_KEY]))
    return tuple(made)


def check_fields(config: Any) -> None:
    """Check every option of a dataclass, also of a frozen one; call it in ``__post_init__``."""
    for option in options(type(config)):
        object.__setattr__(config, option.name, option.checked(getattr(config, option.name)))


def one_of(name: str, value: Any, allowed: Sequence[str], also: str = "") -> str:
    """``value`` if it is one of these words, LeanconvError if not. ``also``: what else is allowed, for the message."""
    if not isinstance(value, str) or value not in allowed:
        words = listing([repr(item) for item in allowed]) + (f" {also}" if also else "")
        raise LeanconvError(f"{name}={value!r} is not known; use {words}.")
    return value


def number_in(name: str, value: Any, **bounds: float | None) -> float:
    """``value`` as a float if it is a finite number within ``bounds`` (at_least, above, at_most, under), LeanconvError
    if not."""
    finite = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if not finite or not all(limit is None or _LIMITS[key][1](value, limit) for key, limit in bounds.items()):
        raise LeanconvError(f"{name}={value!r} must be a number {_described(bounds)}.")
    return float(value)


def _described(bounds: dict[str, float | None]) -> str:
    return " and ".join(f"{_LIMITS[key][0]} {limit:g}" for key, limit in bounds.items() if limit is not None)


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    rest = [part for part in typing.get_args(hint) if part is not type(None)]
    return rest[0] if len(rest) == 1 else typing.Union[tuple(rest)]  # noqa: UP007
