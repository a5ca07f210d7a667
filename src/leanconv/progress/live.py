"""Progress on a terminal: the layers solved so far, and below them what is being done and how long it will take."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import IO, TYPE_CHECKING, cast

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.file_proxy import FileProxy
from rich.live import Live as RichLive
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from leanconv.progress.stage import Pace, Solved, Stage, clock
from leanconv.system.text_table import table

if TYPE_CHECKING:
    from leanconv.progress.reporter import Forgiving

HEADS = ("layer", "scheme", "ranks", "error")
# Lines of a terminal that are not layers: two of heads, one of what is not shown, the state, and two to spare.
OTHER_LINES = 6
BAR = 20  # columns, where there are WIDE at least
WIDE = 70
CUT = "..."  # in place of the beginning of a long name


def console(file: Forgiving) -> Console:
    """A console that prints what it is given: no markup, no colours of its own."""
    return Console(file=cast("IO[str]", file), markup=False, highlight=False, emoji=False, soft_wrap=True)


class Live:
    """One display a stage; the layers stay from one stage to the next."""

    def __init__(self, screen: Console):
        self._screen = screen
        self._layers: dict[str, Solved] = {}

    @contextmanager
    def stage(self, title: str, steps: int) -> Iterator[Stage]:
        view = _View(title, Pace(steps), self._layers)
        display = RichLive(view, console=self._screen, transient=True, redirect_stdout=False, redirect_stderr=False)
        with display, _printing_above(self._screen):
            try:
                yield view
            except BaseException:
                display.transient = False  # what was solved is worth seeing
                raise
        self._screen.print(f"leanconv: {title}: done in {view.pace.elapsed:.1f} s")


class _View:
    """A stage as it stands, drawn anew for every frame: the terminal may have another size by then."""

    def __init__(self, title: str, pace: Pace, layers: dict[str, Solved]):
        self.title = title
        self.pace = pace
        self.layers = layers
        self._text = ""

    def advance(self) -> None:
        self.pace.done += 1

    def label(self, text: str) -> None:
        self._text = text

    def solved(self, layer: Solved, number: int, of: int) -> None:
        self.layers[layer.name] = layer
        self._text = f"{number} of {of} layers"

    def __rich_console__(self, screen: Console, options: ConsoleOptions) -> RenderResult:
        if self.layers:
            lines = layer_lines(list(self.layers.values()), options.max_width, screen.size.height - OTHER_LINES)
            yield Text("\n".join(lines), no_wrap=True, overflow="crop")
        share = f"{100 * self.pace.share:.0f} %" if self.pace.steps else ""
        times = ", ".join(filter(None, [f"{clock(self.pace.elapsed)} gone", self.pace.said()]))
        words = "  ".join(filter(None, [share, times, self._text]))
        state = Table.grid(padding=(0, 2, 0, 0))
        cells: list[RenderableType] = [Text(self.title, no_wrap=True)]
        if self.pace.steps and options.max_width >= WIDE:
            cells.append(ProgressBar(total=1.0, completed=self.pace.share, width=BAR))
        state.add_row(*cells, Text(words, no_wrap=True, overflow="crop"))
        yield state


def layer_lines(layers: list[Solved], width: int, height: int) -> list[str]:
    """A table of the last layers that ``height`` lines hold, names cut in front where ``width`` columns are too few."""
    rows = [layer.cells() for layer in layers]
    longest = max(len(name) for name, *_ in rows)
    room = max(len(CUT) + 1, longest + width - max(map(len, table(HEADS, rows, left=2).splitlines())))
    for row in rows:
        row[0] = row[0] if len(row[0]) <= room else CUT + row[0][len(CUT) - room :]
    heads, rule, *lines = table(HEADS, rows, left=2).splitlines()
    shown = lines[-max(1, height) :]
    above = [f"({len(lines) - len(shown)} layers above)"] if len(shown) < len(lines) else []
    return [heads, rule, *above, *shown]


class _Above(FileProxy):
    """What is printed meanwhile goes above the display. A process forked from here, such as one that decodes images,
    has no display, and may have been forked while a thread held the display's lock."""

    def __init__(self, screen: Console, file: IO[str]):
        super().__init__(screen, file)
        self._process = os.getpid()

    def write(self, text: str) -> int:
        if os.getpid() != self._process:
            return self.rich_proxied_file.write(text)
        return super().write(text)

    def flush(self) -> None:
        if os.getpid() != self._process:
            self.rich_proxied_file.flush()
        else:
            super().flush()


@contextmanager
def _printing_above(screen: Console) -> Iterator[None]:
    """stderr, and stdout where it is a terminal as well."""
    with ExitStack() as stack:
        files = [_Above(screen, sys.stderr)]
        stack.enter_context(redirect_stderr(cast("IO[str]", files[0])))
        if sys.stdout is not None and sys.stdout.isatty():
            files.append(_Above(screen, sys.stdout))
            stack.enter_context(redirect_stdout(cast("IO[str]", files[1])))
        for file in files:
            stack.callback(file.flush)
        yield
