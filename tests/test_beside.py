"""What is written beside its place and moved there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from leanconv.beside import folders_of, part_beside
from leanconv.errors import LeanconvError
from leanconv.export.place import new_file


def leftover(place: Path, process: int) -> Path:
    left = place.with_name(f".{place.name}.{process}-{'0' * 32}.leanconv-part")
    left.mkdir()
    return left


def a_process_that_has_ended() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_what_killed_processes_left_of_the_same_place_is_cleared(tmp_path: Path) -> None:
    place, ended = tmp_path / "net.onnx", a_process_that_has_ended()
    # Of this process's number too: an earlier one had it.
    leftovers = [leftover(place, ended), leftover(place, os.getpid())]
    kept = [leftover(tmp_path / "other.onnx", ended), leftover(place, os.getppid())]
    with new_file(place, "onnx") as path:
        path.write_text("network")
    assert not any(left.exists() for left in leftovers)
    assert all(left.exists() for left in kept)
    assert place.read_text() == "network"


def test_what_this_process_is_writing_elsewhere_stays(tmp_path: Path) -> None:
    """Two threads that write to one place: who comes first wins, and neither clears what the other is writing."""
    begun, go_on = threading.Event(), threading.Event()
    found: list[str] = []

    def slow() -> None:
        with part_beside(tmp_path / "place") as part:
            begun.set()
            go_on.wait(30)
            found.extend(path.name for path in tmp_path.iterdir() if path == part)

    thread = threading.Thread(target=slow)
    thread.start()
    assert begun.wait(30)
    with part_beside(tmp_path / "place") as part:
        assert part.is_dir()
    go_on.set()
    thread.join()
    assert len(found) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_no_folder(tmp_path: Path) -> None:
    def write() -> None:
        with new_file(tmp_path / "new" / "deep" / "net.onnx", "onnx") as path:
            path.write_text("half a netw")
            raise OSError(28, "No space left on device")

    with pytest.raises(LeanconvError, match=r"cannot write .* No space left on device; nothing was left behind"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_another_process_put_something_into_stays(tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"

    def write() -> None:
        with folders_of(path):
            (path.parent / "theirs").write_text("")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write()
    assert [one.name for one in path.parent.iterdir()] == ["theirs"]
