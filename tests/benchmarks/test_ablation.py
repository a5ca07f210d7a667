"""The ablation's cells: kept as files, and taken over from a table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.ablation import run as ablation

ROOT = Path(__file__).parents[2]


TABLE = ROOT / "benchmarks" / "results" / "ablation.json"
MACHINE = "a machine of the test's"


@pytest.mark.parametrize("name", ["ablation", "ablation-cpu"])
def test_the_committed_table_is_that_of_its_cells(name: str) -> None:
    table = TABLE.with_name(f"{name}.json")
    known = ablation.cells_of(table)
    assert len(known) == len(json.loads(table.read_text()))
    found = ablation.markdown(list(known.values()), ablation.asked_for(name))
    assert found.rstrip("\n") + "\n" == table.with_suffix(".md").read_text()


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the script in a folder; the cells it computed."""
    made: list[tuple[str, int]] = []

    def cell(subject: object, speedup: float, row: str, seed: int, paper: Path) -> dict[str, Any]:
        made.append((row, seed))
        like = next(one for one in ablation.cells_of(TABLE).values() if one["model"] == "vgg16-imagenet")
        found = {"model": "vgg16-imagenet", "speedup": speedup, "row": row, "seed": seed, "seconds": 1.5}
        return {**like, **found, "kl": 0.125, "machine": MACHINE}

    class Subject:
        model = calibration = ()
        name, error = "vgg16-imagenet", "top5"
        base = SimpleNamespace(top1=0.463, top5=0.765)

    monkeypatch.setattr(ablation, "cell", cell)
    monkeypatch.setitem(ablation.NETWORKS, "vgg16-imagenet", lambda *_: Subject)
    monkeypatch.setattr(ablation.leanconv, "accelerate", lambda *_, **__: None)

    def run(*words: str) -> list[tuple[str, int]]:
        made.clear()
        common = ["--data", "none", "--speedups", "4", "--work", str(tmp_path / "work"), "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["run", *common, *words])
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
    assert {one["code"] for one in found.values()} == {ablation.commit()}
    assert asked(*rows, "--known", str(TABLE)) == []
    assert len(ablation.cells_of(tmp_path / "ablation.json")) == len(ablation.cells_of(TABLE)) + 2


def test_times_are_of_cells_without_any(asked: Any, tmp_path: Path) -> None:
    """Every other cell of a table has no seconds; these are run again for theirs, and keep all else."""
    cells = [
        {**one, "seconds": None if one["seed"] == 1 else 2.5}
        for one in ablation.cells_of(TABLE).values()
        if (one["model"], one["speedup"]) == ("vgg16-imagenet", 4.0)
    ]
    (tmp_path / "known.json").write_text(json.dumps(cells))
    lacking = {(one["row"], one["seed"]) for one in cells if one["seconds"] is None}
    assert 0 < len(lacking) < len(cells)
    assert set(asked("--times", "--known", str(tmp_path / "known.json"), "--code", "abc1234")) == lacking
    after = ablation.cells_of(tmp_path / "ablation.json")
    assert len(after) == len(cells)
    for one in cells:
        if one["seconds"] is None:
            one |= {"seconds": 1.5, "timed on": MACHINE, "timed of": "abc1234", "kl again": 0.125}
        assert after[ablation.name_of(one)] == one


def test_cells_of_another_network_are_refused(asked: Any, tmp_path: Path) -> None:
    other = [{**one, "original": {**one["original"], "top1": 46.2}} for one in ablation.cells_of(TABLE).values()]
    (tmp_path / "other.json").write_text(json.dumps(other))
    with pytest.raises(SystemExit, match=r"top-1 of 46.30 .* known cells 46.20 .* another network"):
        asked("--rows", "distilled", "--seeds", "9", "--known", str(tmp_path / "other.json"))
    assert not list((tmp_path / "work").iterdir())


def test_a_row_is_paired_with_the_papers_of_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 400 pictures the paper's gets 300 right, the row these and 40 more: a gain of 10 points, surely of 5."""
    right = torch.arange(400) < 300
    found = [right, right | (torch.arange(400) >= 360)]

    class Subject:
        name, device, calibration, model = "resnet20-cifar10", "cpu", (), None
        error, base = "top1", SimpleNamespace(top1=0.9, top5=0.99)

        def judged(self, _: object) -> Any:
            return SimpleNamespace(low=0.0, high=0.0, agreement=1.0, kl=0.0), found.pop(0)

        def increase(self, _: object) -> float:
            return 0.0

    monkeypatch.setattr(ablation.leanconv, "accelerate", lambda *_, **__: SimpleNamespace(model=None, speedup=2.0))
    file = tmp_path / "right.pt"
    cells = [ablation.cell(Subject(), 2.0, row, 0, file) for row in (ablation.PAPER, "distilled")]  # type: ignore[arg-type]
    assert "gained, low" not in cells[0]
    low, high = cells[1]["gained, low"], cells[1]["gained, high"]
    assert 5 < low < 10 < high < 15
    table = ablation.markdown([{**one, "code": "abc1234"} for one in cells])
    assert f"| distilled | 0.00 (0.00) | 0.0 to 0.0 | {low:.1f} to {high:.1f} | 100.00 | 0.0000 |" in table
    assert "| the paper's 3d | 0.00 (0.00) | 0.0 to 0.0 |  | 100.00 | 0.0000 |" in table


def test_a_table_that_is_not_there_is_refused(asked: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        asked("--known", "nowhere.json")
    assert "--known takes the .json of a table" in capsys.readouterr().err
