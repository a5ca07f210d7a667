"""The one error users see, the words it is made of, and warnings."""

from __future__ import annotations

import difflib
import numbers
import sys
from collections.abc import Iterable
from typing import Any


class LeanconvError(ValueError):
    """Bad input. The message says what was given, what is allowed and what to do.

    Examples:
        >>> import leanconv, torch
        >>> leanconv.accelerate(leanconv.models.character_cnn(), torch.rand(2, 1, 24, 24), speedup=-4)
        Traceback (most recent call last):
        leanconv.errors.LeanconvError: speedup=-4 must be a number above 1, for example 4.0.
    """


class Unreadable(Exception):
    """An item of a dataset that cannot be read, by name, and why: another is taken instead."""

    def __init__(self, name: str, reason: str):
        super().__init__(name, reason)
        self.name, self.reason = name, reason


def listing(names: Iterable[object], limit: int = 5) -> str:
    """Long lists stay one sentence.

    >>> listing("abcdefg", 3)
    'a, b, c and 4 more'
    """
    items = [str(name) for name in names]
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"


def unknown_name(given: str, known: Iterable[str], *, what: str, where: str) -> LeanconvError:
    """An error for a name that does not exist, with the nearest names that do."""
    known = list(known)
    near = difflib.get_close_matches(given, known, n=3, cutoff=0.4)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    else:
        hint = f"known: {listing(known, 8)}." if known else "there are none."
    return LeanconvError(f"{where} names the {what} {given!r}, which does not exist; {hint}")


def whole(name: str, value: Any, least: int) -> int:
    """``value`` if it is a whole number of at least ``least``; else refused."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) < 1 << 32:
        raise LeanconvError(f"{name}={value!r} must be a whole number from {least} to {(1 << 32) - 1}.")
    return int(value)


def warn(text: str) -> None:
    """What users should know and need not stop for."""
    print(f"leanconv: warning: {text}", file=sys.stderr, flush=True)
