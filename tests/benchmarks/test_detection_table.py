"""The table of detectors: known cells stay, and milliseconds are of both orders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.detection import run as detection
from benchmarks.detection import table as detection_table
from benchmarks.detection import times as detection_times
from benchmarks.detection import training as detection_training
from leanconv.runtimes.bench.measure import Rounds
from tests.support.detection_benchmark import Probe, given


def test_the_table_goes_on_where_it_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, out = folder / "work", folder / "out"
    places = ["--work", str(work), "--out", str(out)]
    common = ["table", *given(folder), *places, "--seeds", "0", "1", "--speedups", "2", "--tune-epochs", "1"]
    detection.main([*common, "--merge"])
    assert "| original | not measured | not measured | not measured |" in (out / "detection.md").read_text()

    detection.main([*common, "--seeds", "0", "--rows", "first"])
    assert {path.stem for path in (work / "cells").iterdir()} == {"baseline-seed0", "first-2x-seed0"}
    detection.main([*common, "--seeds", "0"])
    kept = {path.name: path.read_bytes() for path in (work / "cells").iterdir()}
    assert set(kept) == {f"{name}-seed0.json" for name in ("baseline", "first-2x", "after-2x", "tuned-2x")}

    def never(*_: object, **__: object) -> None:
        raise AssertionError("what is known is not measured again")

    monkeypatch.setattr(detection_table, "train", never)
    monkeypatch.setattr(detection_table, "accelerated", never)
    detection.main([*common, "--seeds", "0"])
    assert {path.name: path.read_bytes() for path in (work / "cells").iterdir()} == kept

    detection.main([*common, "--merge"])
    table = json.loads((out / "detection.json").read_text())
    assert [row["kind"] for row in table["rows"]] == ["baseline", "first", "after", "tuned"]
    base = table["rows"][0]["cells"][0]
    for row in table["rows"][1:]:
        cell, missing = row["cells"]
        assert missing is None
        assert cell["map"] - base["map"] == pytest.approx(cell["difference"])
        assert cell["low"] <= cell["high"]
        assert base["macs"] / cell["macs"] == pytest.approx(2, rel=0.05)
    lines = (out / "detection.md").read_text().splitlines()
    assert sum("not measured" in line for line in lines) == 4  # the second seed of every row

    with pytest.raises(SystemExit, match="was measured with other settings"):
        detection.main([*common, "--merge", "--lr", "0.5"])


def test_times_are_of_both_orders_beside_the_original(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection_times, "original", lambda weights: Probe().eval())
    ratios = []

    def timed(calls: dict[str, object], *, seconds: float, finish: object) -> Rounds:
        times = {name: [2.0, 8.0, 4.0] if "original" in name else [1.0, 2.0, 2.0] for name in calls}
        return Rounds(times, warm_up=1, settled=True)

    row = detection_times.row

    def seen(title: str, speedup: float, networks: dict[str, nn.Module], *rest: object) -> object:
        macs = {name: detection_training.backbone_macs(network, 64, "cpu") for name, network in networks.items()}
        ratios.append(macs["original"] / macs["this"])
        with torch.no_grad():  # those that stand in are detectors
            assert len(networks["this"]([torch.rand(3, 40, 64)])) == 1
        return row(title, speedup, networks, *rest)

    monkeypatch.setattr(detection_times, "interleaved", timed)
    monkeypatch.setattr(detection_times, "row", seen)
    places = ["--weights", "none", "--calibration", str(folder / "train-0.tar"), "--out", str(folder)]
    small = ["--pictures", "4", "--samples", "200", "--size", "64", "--width", "16", "--device", "cpu"]
    detection_times.main([*places, *small, "--speedups", "2"])
    assert ratios == pytest.approx([2, 2], rel=0.05)
    table = json.loads((folder / "detection_times-cpu.json").read_text())
    assert [one["title"] for one in table["rows"]] == ["accelerated, then trained", "trained, then accelerated"]
    assert [one["faster"]["value"] for one in table["rows"]] == [2.0, 2.0]  # the median of 2, 8, 4 by that of 1, 2, 2
    assert [one["ms"]["original"] for one in table["rows"]] == [1000.0, 1000.0]  # of 4 pictures a call, 4 seconds
    assert (
        "--pictures 4 --samples 200 --seconds 10 --size 64 --width 16 --speedups 2`"
        in (folder / "detection_times-cpu.md").read_text()
    )


def test_what_cells_share_can_be_made_beforehand(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes then share the cells out, and none of them makes it twice."""
    work, out = folder / "work", folder / "out"
    common = ["table", *given(folder), "--work", str(work), "--out", str(out), "--seeds", "0", "--speedups", "2"]
    detection.main([*common, "--only", "classifier"])
    assert [path.name for path in (work / "models").iterdir()] == ["classifier-2x"]
    with pytest.raises(SystemExit, match="classifier-2x' was accelerated with"):
        detection.main([*common, "--only", "classifier", "--samples", "700"])
    detection.main([*common, "--only", "baseline"])
    assert [path.name for path in (work / "cells").iterdir()] == ["baseline-seed0.json"]
    assert not out.exists()

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it is there")

    monkeypatch.setattr(detection_table, "accelerated", never)
    trained = []
    train = detection_table.train
    monkeypatch.setattr(detection_table, "train", lambda *given: trained.append(train(*given)))
    detection.main([*common, "--rows", "first"])
    assert len(trained) == 1
    assert (work / "cells" / "first-2x-seed0.json").exists()


def test_cells_of_a_table_are_known_where_its_detectors_are_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On another machine the table goes on with other seeds: a baseline trained again would be another one."""
    first, second = folder / "first" / "detection.json", folder / "second" / "detection.json"
    common = ["table", *given(folder), "--speedups", "2", "--rows", "first"]
    detection.main([*common, "--work", str(folder / "here"), "--out", str(first.parent), "--seeds", "0"])
    before = json.loads(first.read_text())
    there = [*common, "--work", str(folder / "there"), "--out", str(second.parent), "--known", str(first)]
    detection.main([*there, "--seeds", "1"])
    after = json.loads(second.read_text())
    assert after["seeds"] == [0, 1]
    assert [row["cells"][0] for row in after["rows"]] == [row["cells"][0] for row in before["rows"]]
    assert {path.stem for path in (folder / "there" / "cells").iterdir()} == {"baseline-seed1", "first-2x-seed1"}
    capsys.readouterr()
    detection.main([*there, "--seeds", "0"])
    assert "first-2x-seed0: known" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="give a seed that is not known yet"):
        detection.main([*there, "--seeds", "0", "--rows", "after"])
    with pytest.raises(SystemExit, match="was measured with other settings"):
        detection.main([*there, "--seeds", "2", "--epochs", "2"])
    with pytest.raises(SystemExit, match=r"nowhere\.json' is no file"):
        detection.main([*there, "--known", str(folder / "nowhere.json")])


def test_a_table_goes_on_from_itself_where_its_detectors_are(folder: Path) -> None:
    out, work = folder / "out", folder / "work"
    common = ["table", *given(folder), "--work", str(work), "--out", str(out), "--speedups", "2", "--seeds", "0"]
    detection.main([*common, "--rows", "first"])
    table = str(out / "detection.json")
    detection.main([*common, "--rows", "after", "--known", table])
    assert (work / "cells" / "after-2x-seed0.json").exists()
    for kept in (work / "models").glob("baseline*"):
        kept.unlink()
    with pytest.raises(SystemExit, match="give a seed that is not known yet"):
        detection.main([*common, "--rows", "tuned"])


def test_a_detector_that_was_kept_but_not_judged_is_judged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = folder / "work"
    common = ["table", *given(folder), "--work", str(work), "--seeds", "0", "--only", "baseline"]
    detection.main(common)
    cell = work / "cells" / "baseline-seed0.json"
    cell.unlink()
    monkeypatch.setattr(detection_table, "train", lambda *_: pytest.fail("it is trained"))
    with pytest.raises(SystemExit, match="was trained with other settings"):
        detection.main([*common, "--epochs", "2"])
    detection.main(common)
    assert cell.exists()
