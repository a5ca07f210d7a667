"""Progress on stderr: bars on a terminal where rich is installed, plain lines elsewhere, nothing when off."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Stage(Protocol):
    def advance(self) -> None: ...

    def label(self, text: str) -> None: ...


class Progress(Protocol):
    def stage(self, title: str, steps: int) -> AbstractContextManager[Stage]: ...


def reporter(on: bool) -> Progress:
    """The reporter that fits where stderr goes."""
    if not on or sys.stderr is None:
        return _Silent()
    if sys.stderr.isatty():
        try:
            import rich.progress  # noqa: F401
        except ImportError:
            return _Lines()
        return _Bars()
    return _Lines()


class _SilentStage:
    def advance(self) -> None:
        pass

    def label(self, text: str) -> None:
        pass


class _Silent:
    @contextmanager
    def stage(self, title: str, steps: int) -> Iterator[Stage]:
        yield _SilentStage()


class _LineStage:
    def __init__(self, write: Callable[[str], None]):
        self._write = write

    def advance(self) -> None:
        pass

    def label(self, text: str) -> None:
        self._write(text)


class _Lines:
    @contextmanager
    def stage(self, title: str, steps: int) -> Iterator[Stage]:
        started = time.monotonic()

        def write(text: str) -> None:
            print(f"leanconv: {title}: {text}", file=sys.stderr, flush=True)

        yield _LineStage(write)
        write(f"done in {time.monotonic() - started:.1f} s")


class _Bars:
    @contextmanager
    def stage(self, title: str, steps: int) -> Iterator[Stage]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        bar = RichProgress(
            TextColumn("{task.fields[title]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=Console(stderr=True),
        )
        with bar:
            task = bar.add_task("", total=steps, title=title, text="")

            class BarStage:
                def advance(self) -> None:
                    bar.advance(task)

                def label(self, text: str) -> None:
                    bar.update(task, text=text)

            yield BarStage()
