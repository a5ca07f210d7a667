"""One thing that was looked at."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Line:
    """``found`` is what is there, ``problem`` what is wrong or missing and what to do; either may be None."""

    name: str
    found: str | None = None
    problem: str | None = None

    def __str__(self) -> str:
        return "; ".join(said for said in (self.found, self.problem) if said) or "-"


def attempt(look: Callable[[], Any]) -> tuple[Any, str | None]:
    """What ``look`` returns, or None and why it could not: a broken install fails in any way there is.

    What libraries say about themselves while they are imported is left out.
    """
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return look(), None
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split())[:160]
        return None, f"{type(error).__name__}: {said}" if said else type(error).__name__


def looked_at(name: str, look: Callable[[], str]) -> Line:
    found, problem = attempt(look)
    return Line(name=name, found=found, problem=problem)
