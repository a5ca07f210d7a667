"""Which reporter fits where stderr goes, and the two that need no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from leanconv.progress.stage import Pace, Progress, Solved, Stage


def reporter(on: bool) -> Progress:
    """The reporter that fits where stderr goes."""
    if not on or sys.stderr is None:
        return _Silent()
    file = Forgiving(sys.stderr)
    if file.isatty():
        try:
            from leanconv.progress.live import Live, console
        except ImportError:  # rich is there for the command line; accelerate does without
            return _Lines(file)
        screen = console(file)
        if screen.is_interactive and not screen.is_dumb_terminal:
            return Live(screen)
    return _Lines(file)


class Forgiving:
    """A text file that a run does not fail on: it may be closed, full, or know few characters."""

    def __init__(self, file: TextIO):
        self._file = file
        self.encoding = getattr(file, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError: it is closed
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


class _SilentStage:
    def advance(self) -> None:
        pass

    def label(self, text: str) -> None:
        pass

    def solved(self, layer: Solved, number: int, of: int) -> None:
        pass


class _Silent:
    @contextmanager
    def stage(self, title: str, steps: int) -> Iterator[Stage]:
        yield _SilentStage()


class _LineStage:
    def __init__(self, write: Callable[[str], None], steps: int):
        self._write = write
        self._pace = Pace(steps)

    def advance(self) -> None:
        self._pace.done += 1

    def label(self, text: str) -> None:
        self._write(text)

    def solved(self, layer: Solved, number: int, of: int) -> None:
        left = self._pace.said() if number < of else ""
        self._write(f"{number}/{of} {layer}" + (f" ({left})" if left else ""))


class _Lines:
    def __init__(self, file: Forgiving):
        self._file = file

    @contextmanager
    def stage(self, title: str, steps: int) -> Iterator[Stage]:
        started = time.monotonic()

        def write(text: str) -> None:
            self._file.write(f"leanconv: {title}: {text}\n")
            self._file.flush()

        yield _LineStage(write, steps)
        write(f"done in {time.monotonic() - started:.1f} s")
