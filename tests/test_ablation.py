"""The ablation's cells: kept as files, and taken over from a table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import ablation  # noqa: E402

TABLE = ROOT / "benchmarks" / "results" / "ablation.json"


def test_the_committed_table_is_that_of_its_cells() -> None:
    known = ablation.cells_of(TABLE)
    assert len(known) == len(json.loads(TABLE.read_text()))
    assert ablation.markdown(list(known.values())) == TABLE.with_suffix(".md").read_text()


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the script in a folder; the cells it computed."""
    made: list[tuple[str, int]] = []

    def cell(subject: object, speedup: float, row: str, seed: int) -> dict[str, Any]:
        made.append((row, seed))
        like = next(iter(ablation.cells_of(TABLE).values()))
        return {**like, "model": "vgg16-imagenet", "speedup": speedup, "row": row, "seed": seed, "seconds": 1.5}

    class Subject:
        model = calibration = ()

    monkeypatch.setattr(ablation, "cell", cell)
    monkeypatch.setitem(ablation.NETWORKS, "vgg16-imagenet", lambda *_: Subject())
    monkeypatch.setattr(ablation.leanconv, "accelerate", lambda *_, **__: None)

    def run(*words: str) -> list[tuple[str, int]]:
        made.clear()
        common = ["--data", "none", "--speedups", "4", "--work", str(tmp_path / "work"), "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["ablation.py", *common, *words])
        ablation.main()
        return list(made)

    return run


def test_what_is_known_is_not_computed_again_and_stays_in_the_table(asked: Any, tmp_path: Path) -> None:
    rows = ["--rows", "distilled", "the paper's 3d", "--seeds", "0", "9"]
    assert asked(*rows, "--known", str(TABLE)) == [("distilled", 9), ("the paper's 3d", 9)]
    assert asked(*rows) == [("distilled", 0), ("the paper's 3d", 0)]  # without the table, which has these
    found = ablation.cells_of(tmp_path / "ablation.json")
    assert len(found) == 4
    assert len(list((tmp_path / "work").iterdir())) == 4
    assert asked(*rows, "--known", str(TABLE)) == []
    assert len(ablation.cells_of(tmp_path / "ablation.json")) == len(ablation.cells_of(TABLE)) + 2


def test_times_are_of_cells_without_any(asked: Any, tmp_path: Path) -> None:
    lacking = {
        (one["row"], one["seed"])
        for one in ablation.cells_of(TABLE).values()
        if (one["model"], one["speedup"], one["seconds"]) == ("vgg16-imagenet", 4.0, None)
    }
    assert set(asked("--times", "--known", str(TABLE))) == lacking
    before, after = ablation.cells_of(TABLE), ablation.cells_of(tmp_path / "ablation.json")
    for name, one in after.items():
        assert {**one, "seconds": None, "timed on": None} == {**before[name], "seconds": None, "timed on": None}


def test_a_table_that_is_not_there_is_refused(asked: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        asked("--known", "nowhere.json")
    assert "--known takes the .json of a table" in capsys.readouterr().err
