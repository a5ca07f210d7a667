"""The benchmark of how many samples are enough: what it finds is added to what there is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.ablation import samples

ROOT = Path(__file__).parents[2]


MODEL, MACHINE = "resnet20-cifar10", "a machine of the test's"


def one(way: str, seed: int, kl: float, **others: Any) -> dict[str, Any]:
    original = {"top1": 90.0, "top5": 99.5, "error": "top1"}
    known = {"model": MODEL, "speedup": 2.0, "way": way, "seed": seed, "kl": kl, "seconds": None, "samples": 5e4}
    return {**known, "machine": MACHINE, "original": original, "images": [2400, 600], **others}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def made(subject: Any, original: dict[str, Any], way: str, seed: int) -> dict[str, Any]:
        return one(way, seed, 0.5, original=original)

    class Subject:
        model = calibration = ()
        name, error = MODEL, "top1"
        base = SimpleNamespace(top1=0.9, top5=0.995)

    monkeypatch.setattr(samples, "cell", made)
    monkeypatch.setattr(samples, "held_out", lambda subject: subject)
    monkeypatch.setattr(samples, "machine", lambda device: MACHINE)
    monkeypatch.setattr(samples.leanconv, "accelerate", lambda *_, **__: None)
    monkeypatch.setitem(samples.NETWORKS, MODEL, lambda *_: Subject)

    def asked(*words: str) -> None:
        common = ["--data", "none", "--model", MODEL, "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["samples", *common, *words])
        samples.main()

    return asked


def test_the_committed_table_is_that_of_its_cells() -> None:
    table = ROOT / "benchmarks" / "results" / "samples.json"
    assert samples.markdown(json.loads(table.read_text())).rstrip("\n") + "\n" == table.with_suffix(".md").read_text()


def test_new_cells_take_the_place_of_their_like_alone(run: Any, tmp_path: Path) -> None:
    known = [one("all", 0, 0.1), one("50,000", 0, 0.2), one("50,000", 0, 0.3, machine="another")]
    (tmp_path / "samples.json").write_text(json.dumps(known))
    run("--ways", "50,000", "--seeds", "0", "1")
    found = {
        (cell["way"], cell["seed"], cell["machine"]): cell["kl"]
        for cell in json.loads((tmp_path / "samples.json").read_text())
    }
    assert found == {
        ("all", 0, MACHINE): 0.1,
        ("50,000", 0, "another"): 0.3,
        ("50,000", 0, MACHINE): 0.5,
        ("50,000", 1, MACHINE): 0.5,
    }
    assert "original: top-1 90.00 %" in (tmp_path / "samples.md").read_text()


def test_what_cannot_be_read_loses_nothing(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = json.dumps([one("all", 0, 0.1)])
    (tmp_path / "samples.json").write_text(before)

    def nowhere(*_: Any) -> None:
        raise FileNotFoundError("no pictures")

    monkeypatch.setitem(samples.NETWORKS, MODEL, nowhere)
    with pytest.raises(FileNotFoundError):
        run()
    assert (tmp_path / "samples.json").read_text() == before


def test_another_network_is_refused(run: Any, tmp_path: Path) -> None:
    other = one("all", 0, 0.1, original={"top1": 91.0, "top5": 99.5, "error": "top1"})
    (tmp_path / "samples.json").write_text(json.dumps([other]))
    with pytest.raises(SystemExit, match="another network"):
        run("--ways", "50,000", "--seeds", "0")
    assert len(json.loads((tmp_path / "samples.json").read_text())) == 1
