"""Progress on stderr: a bar and a line for each layer on a terminal, plain lines elsewhere, nothing when off."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Protocol, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Solved:
    """A layer that has its factors. ``error`` is None where it is measured later, for all layers together."""

    name: str
    scheme: str
    ranks: tuple[int, ...]
    error: float | None

    def __str__(self) -> str:
        ranks = f" rank {' x '.join(map(str, self.ranks))}" if self.ranks else ""
        error = "" if self.error is None else f", error {self.error:.3f}"
        return f"{self.name} {self.scheme}{ranks}{error}"


class Stage(Protocol):
    """``advance``: one more step is done. ``label``: what is being done now. ``solved``: layer ``number`` of ``of``."""

    def advance(self) -> None: ...
    def label(self, text: str) -> None: ...
    def solved(self, layer: Solved, number: int, of: int) -> None: ...


class Progress(Protocol):
    def say(self, text: str) -> None:
        """A line between the parts."""

    def stage(self, title: str, steps: int) -> AbstractContextManager[Stage]:
        """A part of the run with so many steps; 0 where the number is not known."""


def reporter(on: bool) -> Progress:
    """The reporter that fits where stderr goes."""
    if not on or sys.stderr is None:
        return _Lines(None)
    file = SafeFile(sys.stderr)
    if file.isatty():
        with suppress(ImportError):  # the command line needs rich; accelerate works without it
            from rich.console import Console

            screen = Console(file=cast("IO[str]", file), markup=False, highlight=False, emoji=False, soft_wrap=True)
            if screen.is_interactive and not screen.is_dumb_terminal:
                return _Bar(screen)
    return _Lines(file)


class SafeFile:
    """A text file whose errors do not stop a run: it may be closed, full, or unable to encode a character."""

    def __init__(self, file: TextIO):
        self._file = file
        self.encoding = getattr(file, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError: the file is closed
            self._file.write(text.encode(self.encoding, "replace").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._file.flush()

    def isatty(self) -> bool:
        with suppress(OSError, ValueError):
            return self._file.isatty()
        return False

    def fileno(self) -> int:
        return self._file.fileno()


@dataclass
class Pace:
    """Steps done, and how long the others will take if each takes as long as those did."""

    steps: int  # 0 where the number is not known
    done: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def left(self) -> float | None:
        """Seconds; None before the first step."""
        share = min(1.0, self.done / self.steps) if self.steps else 0.0
        return self.elapsed * (1 - share) / share if share else None

    def __str__(self) -> str:
        """The time left in words; empty where it is not known or less than a second."""
        if self.left is None or self.left < 1:
            return ""
        minutes, seconds = divmod(round(self.left), 60)
        hours, minutes = divmod(minutes, 60)
        return (f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}") + " left"


@dataclass
class _LineStage:
    write: Callable[[str], None]
    pace: Pace

    def advance(self) -> None:
        self.pace.done += 1

    def label(self, text: str) -> None:
        self.write(text)

    def solved(self, layer: Solved, number: int, of: int) -> None:
        left = str(self.pace) if number < of else ""
        self.write(f"{number}/{of} {layer}" + (f" ({left})" if left else ""))


@dataclass
class _Lines:
    file: SafeFile | None  # None: nothing is written

    def say(self, text: str) -> None:
        if self.file is not None:
            self.file.write(f"leanconv: {text}\n")
            self.file.flush()

    @contextmanager
    def stage(self, title: str, steps: int) -> Iterator[Stage]:
        def write(text: str) -> None:
            self.say(f"{title}: {text}")

        pace = Pace(steps)
        yield _LineStage(write, pace)
        write(f"done in {pace.elapsed:.1f} s")


@dataclass
class _BarStage:
    update: Callable[..., None]  # of rich's bar: advance=, text=
    write: Callable[[str], None]

    def advance(self) -> None:
        self.update(advance=1)

    def label(self, text: str) -> None:
        self.update(text=text)

    def solved(self, layer: Solved, number: int, of: int) -> None:
        self.write(f"{number}/{of} {layer}")
        self.update(text=f"{number} of {of} layers")


@dataclass
class _Bar:
    """A bar for each stage. It disappears at the end; the lines above it stay."""

    screen: Console

    def say(self, text: str) -> None:
        self.screen.print(f"leanconv: {text}")

    @contextmanager
    def stage(self, title: str, steps: int) -> Iterator[Stage]:
        from rich import progress as bars

        def write(text: str) -> None:
            self.say(f"{title}: {text}")

        _undo_redirect_in_forks()
        pace = Pace(steps)
        columns = (
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(20),
            bars.TaskProgressColumn(),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.fields[text]}", markup=False),
        )
        terminal = (
            sys.stdout is not None and SafeFile(sys.stdout).isatty()
        )  # what is printed there goes above the bar too
        # The time left is estimated from the steps of the last day: one may take minutes.
        options: dict[str, Any] = {"transient": True, "redirect_stdout": terminal, "speed_estimate_period": 86_400}
        with bars.Progress(*columns, console=self.screen, **options) as bar:
            task = bar.add_task(title, total=steps or None, text="")
            yield _BarStage(lambda **changes: bar.update(task, **changes), write)
        write(f"done in {pace.elapsed:.1f} s")


@functools.cache  # once a process
def _undo_redirect_in_forks() -> None:
    """While a bar is shown, rich prints what goes to stderr above it, under a lock. A process forked from here, such as
    one that decodes images, has no bar, and may be forked while a thread holds that lock: it gets the file itself."""
    from rich.file_proxy import FileProxy

    def undo() -> None:
        for name in ("stdout", "stderr"):
            while isinstance(file := getattr(sys, name), FileProxy):
                setattr(sys, name, file.rich_proxied_file)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=undo)
