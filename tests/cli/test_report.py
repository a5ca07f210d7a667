"""The report as a file: what it replaces, a full disk, no plotly, and the commands that write it."""

from __future__ import annotations

import errno
import html
import json
import os
import sys
from pathlib import Path

import pytest

import leanconv
from leanconv import LeanconvError
from leanconv.cli.main import run
from leanconv.report import render, write_report
from leanconv.report.facts import facts_of
from tests.support import reports
from tests.support.command import NETWORK
from tests.support.networks import plain_network
from tests.support.pictures import write_picture

# Fixtures, which pytest looks for by name in this file.
result, folder = reports.result, reports.folder


def test_only_reports_are_replaced(folder: Path, tmp_path: Path) -> None:
    first = write_report(folder)
    assert first == folder / "report.html"
    assert write_report(folder) == first
    assert leanconv.load(folder, plain_network()) is not None  # the page is no part of what is checked
    other = tmp_path / "other.html"
    other.write_text("<p>mine</p>")
    with pytest.raises(LeanconvError, match="exists and is no report of leanconv"):
        write_report(folder, other)
    assert other.read_text() == "<p>mine</p>"
    with pytest.raises(LeanconvError, match="is a folder; give the name of a file"):
        write_report(folder, tmp_path)
    with pytest.raises(LeanconvError, match="is not a folder you may write to"):
        write_report(folder, other / "report.html")
    with pytest.raises(LeanconvError, match="is not a folder; give one that"):
        write_report(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_full_disk_leaves_the_old_report(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_report(folder)
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for place in (path, tmp_path / "new" / "report.html"):
        with pytest.raises(LeanconvError, match="No space left on device; nothing was changed"):
            write_report(folder, place)
    assert path.read_bytes() == before
    assert not (tmp_path / "new").exists()
    assert [item.name for item in folder.iterdir() if item.name.startswith(".")] == []


def test_without_plotly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    render.plotly_js.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(LeanconvError, match=r"plotly is not installed; pip install 'leanconv\[report\]'"):
        write_report(folder)


def call(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["leanconv", *arguments])
    with pytest.raises(SystemExit) as caught:
        run()
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


def test_the_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    code, out, _ = call(["report", str(folder)], monkeypatch, capsys)
    assert code == 0
    assert out.startswith(f"{folder / 'report.html'}: ")
    target = tmp_path / "deep" / "page.html"
    code, out, _ = call(["report", str(folder), "--out", str(target), "--json"], monkeypatch, capsys)
    assert code == 0
    assert json.loads(out) == {"report": str(target), "bytes": target.stat().st_size}
    code, out, err = call(["report", str(tmp_path)], monkeypatch, capsys)
    assert code == 2
    assert "has no leanconv.json" in err
    assert err.count("\n") == 1


def test_accelerate_writes_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "net.py").write_text(NETWORK)
    for number in range(4):
        write_picture(tmp_path / "photos" / f"{number}.png", 30 + 60 * number)
    monkeypatch.chdir(tmp_path)
    words = "accelerate net.py:build --images photos --size 16 --speedup 1.5 --samples 200 --out net-1.5x --report -q"
    code, out, err = call([*words.split(), "--workers", "0"], monkeypatch, capsys)
    assert code == 0, err
    assert "report: net-1.5x/report.html, open it in a browser" in out
    facts = facts_of(Path("net-1.5x"))
    assert facts.typed
    assert facts.repeat == f"leanconv {words} --workers 0"
    assert html.escape(facts.repeat) in Path("net-1.5x/report.html").read_text()
