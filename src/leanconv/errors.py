"""The one error users see, and the words it is made of."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LeanconvError(ValueError):
    """Bad input. The message says what was given, what is allowed and what to do."""


def listing(names: Iterable[object], limit: int = 5) -> str:
    """``a, b, c and 4 more``: long lists stay one sentence."""
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
