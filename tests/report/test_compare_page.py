"""The page that ``leanconv compare --plot`` writes: its points, in a browser too, and which files it leaves alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

import leanconv
from leanconv.report.comparison import against_macs, against_time, compare
from leanconv.report.render import comparison_page as page
from leanconv.storage.records import write_record
from tests.support.comparisons import evaluation, timing


def test_charts_have_a_point_a_folder_and_the_original(saved: Path, made: dict[str, leanconv.Accelerated]) -> None:
    for name, lost in (("half", 0.02), ("third", 0.05)):
        write_record(saved / name, "evaluation", evaluation(lost))
    write_record(saved / "half", "bench", timing({"torch": (4.0, 2.0), "openvino": (3.0, 1.0)}))
    results = compare(["half", "third"]).results
    points = {
        point["name"]: point
        for series in against_macs(results)
        for point in series["points"]  # type: ignore[attr-defined]
    }
    assert points["half"]["x"] == made["half"].macs_after / 1e6
    assert [points["half"][key] for key in ("y", "low", "high")] == pytest.approx([78, 76, 79])
    original = points["torch.nn.modules.container.Sequential"]
    assert (original["x"], original["y"]) == (made["half"].macs_before / 1e6, 80)
    assert sorted(points) == ["half", "third", "torch.nn.modules.container.Sequential"]
    times = against_time(results)
    assert sorted((one["original"], point["x"]) for one in times for point in one["points"]) == [  # type: ignore[attr-defined]
        (False, 1.0),
        (False, 2.0),
        (True, 3.0),
        (True, 4.0),
    ]


def test_a_page_needs_nothing_else_and_names_stay_text(saved: Path) -> None:
    name = "<img src=x>"
    (saved / "half").rename(saved / name)
    write_record(saved / name, "evaluation", evaluation(0.05))
    text = page(compare([name]))
    assert len(text.encode()) < 6_000_000
    assert name not in text
    assert "&lt;img src=x&gt;" in text
    own = text.replace(text[text.index("<script>") : text.rindex("<script>")], "")  # without the plotting library
    assert not re.search(r"(src|href)\s*=\s*[\"']?https?:", own)


def test_the_command_plots_and_prints_json(saved: Path, leanconv_command) -> None:
    write_record(saved / "half", "evaluation", evaluation(0.05))
    code, out, err = leanconv_command("compare half third --plot plots/two.html --json")
    assert code == 0, err
    found = json.loads(out)
    assert found["plot"] == "plots/two.html"
    assert [one["folder"] for one in found["results"]] == ["half", "third"]
    assert found["results"][0]["accuracy"]["scores"][0]["lost"] == pytest.approx(0.05)
    assert (saved / "plots" / "two.html").read_text().startswith("<!doctype html>")
    code, out, _ = leanconv_command("compare half --plot plots/two.html")  # its own page is replaced
    assert code == 0
    assert out.splitlines()[-1].startswith("plots/two.html: ")


def test_report_of_several_folders_is_the_same_page(saved: Path, leanconv_command) -> None:
    code, out, err = leanconv_command("report half third")
    assert code == 0, err
    assert out.startswith("comparison.html: ")
    text = (saved / "comparison.html").read_text()
    assert "No accuracy is recorded for these folders" in text  # tables and what to do are there anyway
    assert "record it, for FOLDER each of them: leanconv evaluate" in text
    write_record(saved / "half", "evaluation", evaluation(0.05))
    assert leanconv_command("compare half third --plot two.html")[0] == 0
    code, out, _ = leanconv_command("report half third --out comparison.html --json")
    assert code == 0
    assert json.loads(out)["report"] == "comparison.html"
    assert (saved / "comparison.html").read_text() == (saved / "two.html").read_text()
    code, _, err = leanconv_command("report half third --out half")
    assert code == 2
    assert "--out 'half' is a folder; give the name of a file" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("compare nowhere", "'nowhere' is not a folder; give one that result.save() wrote."),
        ("compare half --plot two.pdf", "--plot 'two.pdf' must be a file whose name ends in .html."),
        ("compare half --plot half", "--plot 'half' must be a file whose name ends in .html."),
        ("compare half --plot notes.html", "'notes.html' exists and is no comparison of leanconv"),
        ("compare half --plot two.html", "there is nothing to plot, as no accuracy is recorded; record it: leanconv"),
    ],
)
def test_refusals(arguments: str, message: str, saved: Path, leanconv_command) -> None:
    (saved / "notes.html").write_text("my own")
    code, out, err = leanconv_command(arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert (saved / "notes.html").read_text() == "my own"
    assert not (saved / "two.html").exists()


def test_a_report_and_a_comparison_do_not_replace_each_other(saved: Path, leanconv_command) -> None:
    write_record(saved / "half", "evaluation", evaluation(0.05))
    assert leanconv_command("report half")[0] == 0
    assert leanconv_command("compare half --plot two.html")[0] == 0
    before = [(saved / name).read_bytes() for name in ("half/report.html", "two.html")]
    code, _, err = leanconv_command("compare half --plot half/report.html")
    assert code == 2
    assert "'half/report.html' exists and is no comparison of leanconv" in err
    code, _, err = leanconv_command("report half --out two.html")
    assert code == 2
    assert "'two.html' exists and is no report of leanconv" in err
    assert before == [(saved / name).read_bytes() for name in ("half/report.html", "two.html")]
    assert leanconv_command("compare half --plot two.html")[0] == 0


def test_a_full_disk_leaves_no_folders(saved: Path, leanconv_command, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(saved / "half", "evaluation", evaluation(0.05))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = leanconv_command("compare half --plot new/plots/two.html")
    assert code == 2
    assert "cannot write 'new/plots/two.html': No space left on device; nothing was changed" in err
    assert not (saved / "new").exists()


def test_without_plotly_a_sentence(saved: Path, leanconv_command, monkeypatch: pytest.MonkeyPatch) -> None:
    from leanconv.report.render import plotly_js

    write_record(saved / "half", "evaluation", evaluation(0.05))
    plotly_js.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    code, _, err = leanconv_command("compare half --plot two.html")
    assert code == 2
    assert err == "leanconv: error: plotly is not installed; pip install 'leanconv[report]'.\n"
    assert leanconv_command("compare half")[0] == 0


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium was found on this machine")
def test_a_browser_draws_every_point(saved: Path, leanconv_command) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    for name, lost in (("half", 0.02), ("third", 0.05)):
        write_record(saved / name, "evaluation", evaluation(lost))
    write_record(saved / "half", "bench", timing({"torch": (4.0, 2.0), "openvino": (3.0, 1.0)}))
    assert leanconv_command("compare half third --plot two.html")[0] == 0
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
        errors: list[str] = []
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((saved / "two.html").as_uri())
        page.wait_for_selector("body[data-drawn]")
        drawn = [page.locator(f"#{chart} .scatterlayer .point").count() for chart in ("chart-macs", "chart-times")]
        wide = page.evaluate("document.documentElement.scrollWidth")
        colours = page.evaluate(
            "[...document.querySelectorAll('#chart-macs .point')].map((one) => getComputedStyle(one).fill)"
        )
        browser.close()
    assert errors == []
    assert drawn == [3, 4]  # two folders and the original; two runtimes, each with the original
    assert wide == 390
    assert len(set(colours)) == 3  # the two schemes and the original
    assert "rgb(0, 0, 0)" not in colours
