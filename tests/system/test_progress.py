"""Progress: a bar on a terminal, plain lines elsewhere, and a run that does not fail on either."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import pty
import re
import resource
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import leanconv
import leanconv.pipeline.solve_layers
from leanconv.progress import Pace, SafeFile, reporter
from tests.support.command import ACCELERATE

# Stages without a network: what is tested is the terminal.
STAGES = """
import logging, sys, time
from leanconv.progress import Solved, reporter
progress = reporter(True)
with progress.stage("original network", 2) as stage:
    stage.advance()
with progress.stage("solving", LAYERS) as stage:
    for number in range(1, LAYERS + 1):
        stage.advance()
        stage.solved(Solved(f"block.{number}.conv", "3d", (number, 7), 0.125), number, LAYERS)
        if number == 1:
            logging.getLogger("leanconv").warning("said [/meanwhile]")
        time.sleep(PAUSE)
print("the end", flush=True)
"""


class Terminal:
    """A process whose stderr is a terminal of so many columns and lines, and what it wrote there."""

    def __init__(self, script: str, columns: int = 80, lines: int = 24, **environment: str):
        self.master, slave = pty.openpty()
        self.resize(columns, lines)
        left_out = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE")
        known = {name: value for name, value in os.environ.items() if name not in left_out}
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=slave,
            env={**known, "TERM": "xterm", "PYTHONIOENCODING": "utf-8", **environment},
            start_new_session=True,
        )
        os.close(slave)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, text: str) -> str:
        """What was written up to ``text``."""
        return self._read(text)

    def rest(self) -> str:
        return self._read(None)

    def _read(self, text: str | None) -> str:
        found, limit = "", time.monotonic() + 30
        while (text is None or text not in found) and time.monotonic() < limit:
            if not select.select([self.master], [], [], 1)[0]:
                continue
            try:
                found += os.read(self.master, 65536).decode("utf-8", "replace")
            except OSError:  # Linux says EIO once the other end is closed
                break
        assert text is None or text in found, found
        return found

    def end(self) -> str:
        out, _ = self.process.communicate(timeout=30)
        assert self.process.returncode == 0
        return out.decode()


def script(layers: int, pause: float = 0.0) -> str:
    return STAGES.replace("LAYERS", str(layers)).replace("PAUSE", str(pause))


def plain(text: str) -> str:
    """Without what moves the cursor and colours."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "")


def test_a_terminal_shows_a_line_a_layer_and_a_bar_below() -> None:
    terminal = Terminal(script(3, pause=0.4))
    written = plain(terminal.rest())
    assert terminal.end() == "the end\n"  # stdout was no terminal and is as it was
    assert "leanconv: solving: 3/3 block.3.conv 3d rank 3 x 7, error 0.125\n" in written
    assert re.search(r"solving +\S+ +33% 0:00:0\d \S+ +1 of 3 layers", written)
    assert "said [/meanwhile]" in written
    assert "leanconv: solving: done in" in written


def test_the_bar_is_gone_at_the_end_and_the_cursor_is_back() -> None:
    written = Terminal(script(3)).rest()
    before, _, after = written.rpartition("leanconv: solving: done in")
    assert "layers" not in after
    # Erased (CSI 2 K), then the cursor is shown again.
    assert "\x1b[2K" in before
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_bar_is_not_wider_than_the_terminal(width: int) -> None:
    terminal = Terminal(script(3, pause=0.2), columns=width)
    frames = re.split(r"[\r\n]", terminal.rest())
    terminal.end()
    states = [line for line in map(plain, frames) if "solving" in line and "leanconv: " not in line]
    assert states
    assert max(map(len, states)) <= width


FORKED = """
import os, sys, threading
from leanconv.progress import reporter
with reporter(True).stage("solving", 2) as stage:
    shown = sys.stderr
    child = os.fork()
    if child == 0:
        sys.stderr.write("from a worker")
        sys.stderr.flush()
        os._exit(0 if sys.stderr is sys.__stderr__ else 1)
    assert sys.stderr is shown is not sys.__stderr__
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert sys.stderr is sys.__stderr__
print(code)
"""


def test_a_process_forked_meanwhile_writes_to_the_terminal_itself() -> None:
    """It has no bar, and the lock of the bar may be held in it for ever."""
    terminal = Terminal(FORKED)
    assert "from a worker" in terminal.rest()
    assert terminal.end() == "0\n"


def test_a_terminal_of_another_size_is_no_matter() -> None:
    terminal = Terminal(script(30, pause=0.05), 120, 40)
    terminal.until("of 30 layers")
    for columns, lines in ((30, 8), (1, 1), (200, 60), (80, 24)):
        terminal.resize(columns, lines)
        time.sleep(0.3)
    terminal.rest()
    assert terminal.end() == "the end\n"


def test_a_terminal_that_is_closed_is_no_matter() -> None:
    terminal = Terminal(script(30, pause=0.05))
    terminal.until("of 30 layers")
    os.close(terminal.master)
    assert terminal.end() == "the end\n"


def test_a_terminal_that_knows_ascii_only_gets_ascii() -> None:
    terminal = Terminal(script(3, pause=0.2), PYTHONIOENCODING="ascii")
    written = terminal.rest()
    assert terminal.end() == "the end\n"
    assert written.isascii()
    assert "\\u" not in written
    assert "3 of 3 layers" in written


def test_a_dumb_terminal_gets_plain_lines() -> None:
    terminal = Terminal(script(2), TERM="dumb")
    written = terminal.rest()
    terminal.end()
    assert "\x1b" not in written
    assert "leanconv: solving: 2/2 block.2.conv 3d rank 2 x 7, error 0.125" in written


def test_an_error_leaves_what_was_solved_on_the_terminal() -> None:
    terminal = Terminal(
        "from leanconv.progress import Solved, reporter\n"
        "try:\n"
        "    with reporter(True).stage('solving', 2) as stage:\n"
        "        stage.solved(Solved('conv', '3d', (5, 6), 0.5), 1, 2)\n"
        "        raise KeyboardInterrupt\n"
        "except KeyboardInterrupt:\n"
        "    pass\n"
    )
    written = terminal.rest()
    terminal.end()
    assert "leanconv: solving: 1/2 conv 3d rank 5 x 6, error 0.500" in written
    assert "done in" not in written


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()
    ).eval()


@pytest.mark.parametrize(
    "arguments",
    [{}, {"asymmetric": False}, {"scheme": "spatial"}, {"scheme": "channel"}],
    ids=["3d", "symmetric", "spatial", "channel"],
)
def test_without_a_terminal_there_is_a_line_a_layer(arguments: dict[str, object], capsys) -> None:
    result = leanconv.accelerate(small(), torch.randn(8, 3, 12, 12), 1.5, samples=500, **arguments)
    lines = capsys.readouterr().err.splitlines()
    for number, layer in enumerate(result.layers, 1):
        ranks = " x ".join(map(str, layer.ranks))
        said = f"{number}/{len(result.layers)} {layer.name} {layer.scheme} rank {ranks}, error {layer.error:.3f}"
        assert sum(said in line for line in lines) == 1, lines
    stages = [line.split(": ")[1] for line in lines if "done in" in line]
    assert len(set(stages)) == len(stages)
    assert len(lines) == len(result.layers) + len(stages) + 1, lines  # the last: how long it will take


def test_no_progress_says_nothing(capsys) -> None:
    leanconv.accelerate(small(), torch.randn(8, 3, 12, 12), 1.5, samples=500, progress=False)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == ""


def test_layers_of_an_earlier_run_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    images, fit = torch.randn(8, 3, 12, 12), leanconv.pipeline.solve_layers._fit

    def interrupted(run: object, layer: Any, *responses: object) -> object:
        if layer.name == "4":
            raise KeyboardInterrupt
        return fit(run, layer, *responses)

    monkeypatch.setattr(leanconv.pipeline.solve_layers, "_fit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        leanconv.accelerate(small(), images, 1.5, samples=500, workdir=tmp_path / "work")
    monkeypatch.undo()
    capsys.readouterr()
    leanconv.accelerate(small(), images, 1.5, samples=500, workdir=tmp_path / "work")
    said = capsys.readouterr().err
    assert "1 of 2 layers are known from the workdir" in said
    assert "solving: 2/2 4 " in said


class Broken(io.StringIO):
    """stderr whose reader went away."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_lines_nobody_reads_are_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Broken())
    result = leanconv.accelerate(small(), torch.randn(8, 3, 12, 12), 1.5, samples=500)
    assert result.layers


def test_a_file_is_forgiven_what_it_cannot_write() -> None:
    raw = io.BytesIO()
    latin = io.TextIOWrapper(raw, encoding="latin-1")  # strict about the rest
    file = SafeFile(latin)
    file.write("é ━ \udcff\n")
    file.flush()
    assert raw.getvalue() == "é ? ?\n".encode("latin-1")
    latin.close()
    file.write("into a closed file")
    file.flush()
    assert not file.isatty()


def test_reporter_without_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program without a console, where writing would raise; what is done inside still counts."""
    monkeypatch.setattr(sys, "stderr", None)
    done = []
    with reporter(True).stage("solving", 1) as stage:
        stage.advance()
        stage.label("a line")
        done.append(True)
    assert done
    assert type(reporter(True)) is type(reporter(False))


def test_time_left_is_as_long_as_the_steps_so_far_took() -> None:
    pace = Pace(4, started=time.monotonic() - 30)
    assert pace.left is None
    assert str(pace) == ""
    pace.done = 3
    assert pace.left == pytest.approx(10, abs=1)
    pace.done = 9  # the number of steps was a guess
    assert pace.left == 0
    assert str(pace) == ""
    for seconds, text in ((59.6, "1:00 left"), (61, "1:01 left"), (3661, "1:01:01 left")):
        assert str(Pace(2, done=1, started=time.monotonic() - seconds)) == text


def test_quiet_prints_the_result_alone(place: Path, leanconv_command) -> None:
    for number in range(4, 104):  # one picture in a hundred may be broken
        shutil.copy(place / "photos" / "cat" / "0.png", place / "photos" / "cat" / f"{number}.png")
    (place / "photos" / "cat" / "broken.png").write_bytes(b"no picture")
    code, out, err = leanconv_command(f"{ACCELERATE} --out loud")
    assert code == 0
    assert "broken.png" in err
    assert "solving" in err
    code, out, err = leanconv_command(f"{ACCELERATE} --out fast --quiet")
    assert code == 0
    assert err == ""
    assert "fewer MACs" in out
    assert "cannot be read: " in out
    code, out, err = leanconv_command(f"{ACCELERATE} --out fast --quiet")
    assert code == 2
    assert err == "leanconv: error: 'fast' exists already; choose another name or remove it first.\n"


def test_quiet_does_not_change_what_machines_read(place: Path, leanconv_command) -> None:
    found = []
    for out in ("loud --json", "silent --json --quiet"):
        code, printed, _ = leanconv_command(f"{ACCELERATE} --out {out}")
        assert code == 0
        found.append(json.loads(printed))
    loud, silent = ({**one, "seconds": None, "folder": None, "command": None} for one in found)
    assert loud == silent


def modules_after(*arguments: str) -> set[str]:
    """Modules a fresh interpreter has imported."""
    said = "; import sys; sys.__stderr__.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", "".join(arguments) + said], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


HEAVY = {"torch", "torchvision", "plotly", "onnx", "onnxruntime", "openvino", "matplotlib", "numpy", "PIL", "sklearn"}


def test_import_leanconv_imports_nothing_heavy() -> None:
    found = modules_after("import leanconv")
    assert "leanconv" in found
    assert not found & (HEAVY | {"rich", "typer"})


@pytest.mark.parametrize("asked", ["--help", "--version", "accelerate --help", "compare --help", "doctor --help"])
def test_help_imports_nothing_heavy(asked: str) -> None:
    words = ["leanconv", *asked.split()]
    run = f"import sys; sys.argv = {words!r}; from leanconv.cli.main import app; app(standalone_mode=False)"
    found = modules_after(run)
    assert "leanconv.cli.main" in found
    assert not found & HEAVY


def test_help_takes_little_computing() -> None:
    """CPU time, which other processes on the machine do not lengthen as they do the clock's."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "leanconv", "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.3


def test_an_interrupted_command_says_so(leanconv_command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("leanconv.cli.doctor.examine", interrupted)
    assert leanconv_command("doctor") == (130, "", "leanconv: stopped\n")
