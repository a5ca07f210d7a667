"""Figures kept beside saved results, and several results beside one another."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import leanconv
from leanconv import LeanconvError
from leanconv.cli.evaluate_detector import Asked, evaluate_detectors
from leanconv.cli.output import only_json
from leanconv.cli.saved import open_network
from leanconv.compare import Comparison, compare
from leanconv.compare.charts import against_macs, against_time
from leanconv.compare.page import page
from leanconv.compare.text import as_text
from leanconv.records import read_record, write_record
from tests.conftest import plain_network, smooth_images
from tests.test_cli import ACCELERATE, leanconv_command, place  # noqa: F401
from tests.test_detection_map import place as scenes  # noqa: F401

QUICK = "--device cpu --quiet"


def evaluation(lost: float, images: int = 200, data: str = "val", **more: Any) -> dict[str, Any]:
    """As ``evaluate --json`` prints it, for an original that is right on 80 %."""
    change = {"original": 0.8, "other": 0.8 - lost, "increase": lost, "low": lost - 0.01, "high": lost + 0.02}
    return {"top1": change, "top5": change, "images": images, "data": data, "agreement": 0.9, "views": 1, **more}


def timing(runtimes: dict[str, tuple[float, float]], threads: int = 1, cpu: str = "a CPU") -> dict[str, Any]:
    """As ``bench --json`` prints it; milliseconds of the original and the other, by runtime."""

    def one(ms: float) -> dict[str, Any]:
        return {"median_ms": ms, "low_ms": 0.9 * ms, "high_ms": 1.1 * ms, "noisy": False}

    return {
        "machine": {"cpu": cpu, "gpu": None, "threads": threads, "torch": "2"},
        "conditions": {"dtype": "float32", "input": "images of 3 x 16 x 16", "device": "cpu"},
        "measurements": [
            {
                "runtime": runtime,
                "batch": 1,
                "networks": {"original": one(before), "folder": one(after)},
                "ratio": {"value": before / after, "low": 0.9 * before / after, "high": 1.1 * before / after},
            }
            for runtime, (before, after) in runtimes.items()
        ],
        "layers": [],
        "notes": [],
    }


@pytest.fixture(scope="module")
def made() -> dict[str, leanconv.Accelerated]:
    network, pictures = plain_network(), smooth_images()
    other = plain_network((16, 24, 24, 24))
    quick: dict[str, Any] = {"samples": 1000, "progress": False}
    return {
        "half": leanconv.accelerate(network, pictures, 2.0, **quick),
        "third": leanconv.accelerate(network, pictures, 3.0, scheme="channel", **quick),
        "another": leanconv.accelerate(other, pictures, 2.0, **quick),
    }


@pytest.fixture
def saved(made: dict[str, leanconv.Accelerated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, result in made.items():
        result.save(name)
    return tmp_path


# Records.


def test_a_record_is_what_was_written(tmp_path: Path) -> None:
    assert read_record(tmp_path, "bench") is None
    path = write_record(tmp_path, "bench", {"a": [1, None, "é"]})
    assert path == tmp_path / "bench.json"
    assert read_record(tmp_path, "bench") == {"a": [1, None, "é"]}
    write_record(tmp_path, "bench", {"b": 2})
    assert read_record(tmp_path, "bench") == {"b": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.parametrize("content", ["{", "[1]", "\x00", '{"a": ' * 100_000, ""])
def test_a_damaged_record_is_refused_in_one_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text(content)
    with pytest.raises(LeanconvError, match=r"evaluation\.json' is damaged .* leanconv evaluate --record"):
        read_record(tmp_path, "evaluation")


def test_a_record_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(tmp_path, "bench", {"old": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LeanconvError, match=r"cannot write .*No space left on device; nothing was changed"):
        write_record(tmp_path, "bench", {"new": 2})
    assert read_record(tmp_path, "bench") == {"old": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"]


def test_what_is_recorded_does_not_change_the_result(saved: Path) -> None:
    before = leanconv.load("half", model=plain_network()).state_dict()
    write_record(saved / "half", "bench", timing({"torch": (4.0, 2.0)}))
    write_record(saved / "half", "evaluation", evaluation(0.05))
    after = leanconv.load("half", model=plain_network()).state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_bench_and_evaluate_record_what_they_print(place: Path, leanconv_command) -> None:  # noqa: F811
    assert leanconv_command(f"{ACCELERATE} --out fast --quiet")[0] == 0
    arguments = f"net.py:build fast --record --json {QUICK}"
    code, out, err = leanconv_command(f"bench {arguments} --size 16 --seconds 0.02 --threads 1")
    assert code == 0, err
    assert json.loads(out) == read_record(place / "fast", "bench")
    code, out, err = leanconv_command(f"evaluate {arguments} --data photos --workers 0")
    assert code == 0, err
    assert json.loads(out) == read_record(place / "fast", "evaluation")
    code, out, err = leanconv_command("compare fast")
    assert code == 0, err
    assert "no accuracy" not in out
    assert "no times" not in out
    assert re.search(r"fast +top-1 +\d", out)
    assert re.search(r"fast +torch +1 +1 +\d", out)


def test_a_detector_records_too(scenes: Path, capsys) -> None:  # noqa: F811
    networks = [
        open_network(f"seer.py:{name}", None, None, None, default_weights="none") for name in ("build", "blind")
    ]
    (scenes / "folder").mkdir()
    asked = Asked(
        data="data",
        split=None,
        metric="voc",
        classes=None,
        limit=None,
        batch=4,
        workers=0,
        device=torch.device("cpu"),
        record=scenes / "folder",
        as_json=True,
        quiet=True,
    )
    with only_json(True):
        evaluate_detectors(["build", "folder"], networks, asked)
    recorded = read_record(scenes / "folder", "evaluation")
    assert recorded == json.loads(capsys.readouterr().out)
    assert recorded is not None
    assert recorded["map"]["increase"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bench net.py:build --record", "--record keeps figures of a saved folder against its original; give the"),
        ("bench fast net.py:build --record", "give the original network first and the folder second, not 'fast net"),
        ("bench fast fast --record", "--record keeps figures of a saved folder against its original"),
        ("bench net.py:build photos --record", "'photos' has no leanconv.json"),
        ("evaluate fast --data photos --record", "--record keeps what was lost; give the original network too"),
        ("evaluate net.py:build net.py:grey --data photos --record", "--record keeps figures of a saved folder"),
    ],
)
def test_refusals_of_record(arguments: str, message: str, place: Path, leanconv_command) -> None:  # noqa: F811
    if "fast" in arguments:
        assert leanconv_command(f"{ACCELERATE} --out fast --quiet")[0] == 0
    code, _, err = leanconv_command(f"{arguments} {QUICK}")
    assert code == 2
    assert message in err


# Comparing.


def test_cost_and_errors_come_from_the_results(saved: Path, made: dict[str, leanconv.Accelerated]) -> None:
    found = {result.folder: result for result in compare(["half", "third"]).results}
    for name, result in found.items():
        errors = [layer.error for layer in made[name].layers]
        assert result.speedup == made[name].speedup
        assert (result.mean_error, result.max_error) == (pytest.approx(sum(errors) / len(errors)), max(errors))
        assert (result.scheme, result.accuracy, result.times) == (made[name].options.scheme, None, ())


def test_the_cheapest_is_last_and_each_is_there_once(saved: Path) -> None:
    found = compare(["third", "half", "third", saved / "half", "./third", "half/../half"])
    assert [result.folder for result in found.results] == ["half", "third"]


def test_errors_before_fine_tuning_are_said_to_be(saved: Path, made: dict[str, leanconv.Accelerated]) -> None:
    training = {"history": {}, "settings": {"epochs": 3}, "distilled": True}
    replace(made["half"], training=training).save("tuned")
    assert "errors of the layers of tuned were measured before fine-tuning" in compare(["half", "tuned"]).remarks
    assert "fine-tuning" not in as_text(compare(["half"]))


def test_dearer_is_not_fewer(saved: Path) -> None:
    (result,) = compare(["half"]).results
    dearer = replace(result, macs_after=2 * result.macs_before)
    assert " 2.00x dearer " in as_text(Comparison((dearer,), ()))


def test_a_long_name_leaves_the_table_narrow(saved: Path) -> None:
    (result,) = compare(["half"]).results
    long = "/a/folder" * 30 + "/net.py:build"
    text = as_text(Comparison((replace(result, source=long),), ()))
    assert max(map(len, text.splitlines())) < 140
    assert "/a/folder" in text
    assert "net.py:build" in text  # both ends tell networks apart


def test_what_is_missing_of_several_folders_is_one_sentence(saved: Path) -> None:
    remarks = compare(["half", "third"]).remarks
    assert remarks == (
        "half, third: no accuracy is recorded; record it, for FOLDER each of them: "
        "leanconv evaluate MODEL FOLDER --data DATA --record",
        "half, third: no times are recorded; record them, for FOLDER each of them: "
        "leanconv bench MODEL FOLDER --record",
        "MODEL stands for the original of half, third, as file.py:callable",
    )


def test_recorded_figures_stand_in_the_tables(saved: Path) -> None:
    write_record(saved / "half", "evaluation", evaluation(0.05))
    write_record(saved / "half", "bench", timing({"torch": (4.0, 2.0), "openvino": (3.0, 1.0)}, threads=2))
    text = as_text(compare(["half", "third"]))
    assert re.search(r"half +top-1 +75\.00 +80\.00 +\+5\.00 +\+4\.00 to \+7\.00 +200", text)
    assert re.search(r"half +torch +1 +2 +2\.00 +4\.00 +2\.00x +1\.80 to 2\.20", text)
    assert re.search(r"half +openvino +1 +2 +1\.00 +3\.00 +3\.00x", text)
    assert "third: no accuracy is recorded" in text
    assert "half: no" not in text


def test_missing_figures_are_asked_for_like_those_there_are(saved: Path) -> None:
    write_record(saved / "half", "evaluation", evaluation(0.05, data="my pictures", views=10))
    write_record(saved / "half", "bench", timing({"torch": (4.0, 2.0), "openvino": (3.0, 1.0)}, threads=2))
    remarks = compare(["half", "third"]).remarks
    evaluate, bench = (
        next(remark for remark in remarks if f"leanconv {command} " in remark) for command in ("evaluate", "bench")
    )
    assert evaluate.endswith("leanconv evaluate MODEL third --data 'my pictures' --views 10 --record")
    assert bench.endswith(
        "leanconv bench MODEL third --runtime torch --runtime openvino --batch 1 --device cpu --threads 2 --record"
    )
    assert remarks[-1] == "MODEL stands for the original of third, as file.py:callable"


def test_the_command_that_records_works_as_printed(place: Path, leanconv_command) -> None:  # noqa: F811
    assert leanconv_command(f"{ACCELERATE} --out fast --quiet")[0] == 0
    _, out, _ = leanconv_command("compare fast")
    (command,) = re.findall(r"record it: leanconv (.*)", out)
    assert command == "evaluate net.py:build fast --data DATA --record"
    code, _, err = leanconv_command(f"{command.replace('DATA', 'photos')} {QUICK} --workers 0")
    assert code == 0, err
    assert "no accuracy" not in leanconv_command("compare fast")[1]


def test_weights_of_the_original_are_part_of_the_command(place: Path, leanconv_command) -> None:  # noqa: F811
    own = open_network("net.py:build", None, None, None, default_weights="none").model
    safetensors.torch.save_file(own.state_dict(), "own.safetensors")
    assert leanconv_command(f"{ACCELERATE} --weights own.safetensors --out fast --quiet")[0] == 0
    _, out, _ = leanconv_command("compare fast")
    assert "leanconv evaluate net.py:build fast --data DATA --weights own.safetensors --record" in out


def test_different_originals_are_said(saved: Path) -> None:
    text = " ".join(compare(["half", "third"]).remarks)
    assert "different networks" not in text
    assert "differ (" not in text
    assert "the originals called torch.nn.modules.container.Sequential differ (" in as_text(
        compare(["half", "another"])
    )


def test_networks_of_different_names_are_said(place: Path, leanconv_command) -> None:  # noqa: F811
    (place / "two.py").write_text((place / "net.py").read_text())
    assert leanconv_command(f"{ACCELERATE} --out one --quiet")[0] == 0
    assert leanconv_command(f"{ACCELERATE.replace('net.py', 'two.py')} --out two --quiet")[0] == 0
    code, out, _ = leanconv_command("compare one two")
    assert code == 0
    assert "these were made from different networks (net.py:build, two.py:build)" in out


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ({"evaluation": (evaluation(0.1), evaluation(0.1, images=10))}, "accuracy was measured on different images"),
        ({"evaluation": (evaluation(0.1), evaluation(0.1, views=10))}, "accuracy was measured on different images"),
        (
            {"bench": (timing({"torch": (2.0, 1.0)}), timing({"torch": (2.0, 1.0)}, cpu="another CPU"))},
            "times were measured with different machines (a CPU, another CPU)",
        ),
    ],
    ids=["images", "views", "machines"],
)
def test_figures_that_cannot_be_compared_are_said(records: dict[str, Any], said: str, saved: Path) -> None:
    for name, (first, second) in records.items():
        write_record(saved / "half", name, first)  # type: ignore[arg-type]
        write_record(saved / "third", name, first)  # type: ignore[arg-type]
        assert said not in as_text(compare(["half", "third"]))
        write_record(saved / "third", name, second)  # type: ignore[arg-type]
        assert said in as_text(compare(["half", "third"]))


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


def test_the_command_plots_and_prints_json(saved: Path, leanconv_command) -> None:  # noqa: F811
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
def test_refusals(arguments: str, message: str, saved: Path, leanconv_command) -> None:  # noqa: F811
    (saved / "notes.html").write_text("my own")
    code, out, err = leanconv_command(arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert (saved / "notes.html").read_text() == "my own"
    assert not (saved / "two.html").exists()


@pytest.mark.parametrize("data", [{"top1": 1}, {}, {"map": {"original": 1}, "metric": "voc"}])
def test_a_garbled_record_is_refused(data: dict[str, Any], saved: Path, leanconv_command) -> None:  # noqa: F811
    write_record(saved / "half", "evaluation", data)
    code, _, err = leanconv_command("compare half")
    assert code == 2
    assert "evaluation.json' lacks or garbles" in err
    write_record(saved / "half", "bench", {"measurements": []})
    (saved / "half" / "evaluation.json").unlink()
    code, _, err = leanconv_command("compare half")
    assert code == 2
    assert "bench.json' lacks or garbles" in err


def test_a_report_and_a_comparison_do_not_replace_each_other(saved: Path, leanconv_command) -> None:  # noqa: F811
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


def test_a_full_disk_leaves_no_folders(saved: Path, leanconv_command, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    write_record(saved / "half", "evaluation", evaluation(0.05))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = leanconv_command("compare half --plot new/plots/two.html")
    assert code == 2
    assert "cannot write 'new/plots/two.html': No space left on device; nothing was changed" in err
    assert not (saved / "new").exists()


def test_without_plotly_a_sentence(saved: Path, leanconv_command, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    from leanconv.report.page import plotly_js

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
def test_a_browser_draws_every_point(saved: Path, leanconv_command) -> None:  # noqa: F811
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
