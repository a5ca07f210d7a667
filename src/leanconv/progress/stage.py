"""What is reported of a run: stages, their steps, and the layers that are solved along them."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Solved:
    """A layer that has its factors. ``error`` is None where it is measured once all have theirs."""

    name: str
    scheme: str
    ranks: tuple[int, ...]
    error: float | None

    def cells(self) -> list[str]:
        ranks = " x ".join(str(rank) for rank in self.ranks)
        return [self.name, self.scheme, ranks or "-", "-" if self.error is None else f"{self.error:.3f}"]

    def __str__(self) -> str:
        name, scheme, ranks, error = self.cells()
        said = f"{name} {scheme}" + (f" rank {ranks}" if self.ranks else "")
        return said if self.error is None else f"{said}, error {error}"


class Stage(Protocol):
    def advance(self) -> None:
        """One step more is done."""

    def label(self, text: str) -> None:
        """What is being done now."""

    def solved(self, layer: Solved, number: int, of: int) -> None:
        """``layer`` is the ``number``-th ``of`` so many."""


class Progress(Protocol):
    def stage(self, title: str, steps: int) -> AbstractContextManager[Stage]: ...


@dataclass
class Pace:
    """Steps done, and how long the others will take if they take as long."""

    steps: int  # 0 where nobody knows
    done: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def share(self) -> float:
        return min(1.0, self.done / self.steps) if self.steps else 0.0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def left(self) -> float | None:
        """Seconds; None before the first step."""
        return self.elapsed * (1 - self.share) / self.share if self.share else None

    def said(self) -> str:
        """How long it will take, in words; nothing where that is not known, or less than a second."""
        return f"{clock(self.left)} left" if self.left is not None and self.left >= 1 else ""


def clock(seconds: float) -> str:
    """``1:02:03``, or ``2:03`` within the hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
