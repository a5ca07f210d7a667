"""What is written beside its place and moved there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from leanconv.errors import LeanconvError
from leanconv.report import check_page
from leanconv.runtimes.export.program import new_file
from leanconv.system.atomic_files import check_absent, check_name, check_parent, folders_of, part_beside


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
    with new_file(place) as path:
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


def test_one_place_by_two_paths(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with part_beside(tmp_path / "real" / "place") as one:
        with part_beside(tmp_path / "link" / "place"), part_beside(tmp_path / "real" / ".." / "real" / "place"):
            pass
        assert one.is_dir()


@pytest.mark.parametrize("number", [2**31, 10**30])
def test_what_only_looks_like_a_leftover_stays(tmp_path: Path, number: int) -> None:
    left = leftover(tmp_path / "place", number)
    with part_beside(tmp_path / "place"):
        pass
    assert left.is_dir()


def test_the_longest_name_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 4194303)  # the largest there is on Linux
    place = tmp_path / ("a" * 190)
    check_name(place, "folder")
    with part_beside(place) as part:
        assert part.is_dir()
    with pytest.raises(LeanconvError, match="give a shorter, plain one"):
        check_name(tmp_path / ("a" * 191), "folder")


def refuse(path: Path) -> None:
    check_absent(path)
    check_parent(path)


def test_places_that_cannot_be_looked_at_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "nowhere").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    for path, why in {
        tmp_path / ("a" * 300) / "net": "File name too long",
        tmp_path / "loop" / "net": "Too many levels of symbolic links",
        tmp_path / "nowhere" / "net": "nowhere' is not a folder you may write to",
        tmp_path / "file" / "net": "file' is not a folder you may write to",
        tmp_path / "nowhere": "exists already",
    }.items():
        with pytest.raises(LeanconvError, match=why):
            refuse(path)
    with pytest.raises(LeanconvError, match="File name too long"):
        check_page(tmp_path / ("a" * 300) / "page.html", "report")


def test_an_error_leaves_no_folder(tmp_path: Path) -> None:
    def write() -> None:
        with new_file(tmp_path / "new" / "deep" / "net.onnx") as path:
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
