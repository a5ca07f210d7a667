"""Figures kept beside saved results: what ``bench`` and ``evaluate`` record, and what is refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

import leanconv
from leanconv import LeanconvError
from leanconv.cli.networks import load_network
from leanconv.storage.records import read_record, write_record
from tests.support.command import ACCELERATE
from tests.support.comparisons import QUICK, evaluation, timing
from tests.support.networks import plain_network


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


def test_bench_and_evaluate_record_what_they_print(place: Path, leanconv_command) -> None:
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


def test_a_detector_records_too(scenes: Path) -> None:
    networks = [load_network(f"seer.py:{name}") for name in ("build", "blind")]
    (scenes / "folder").mkdir()
    found = leanconv.evaluate(networks[0].model, "data", networks[1].model, batch=4, progress=False)
    write_record(scenes / "folder", "evaluation", found.to_json())
    recorded = read_record(scenes / "folder", "evaluation")
    assert recorded is not None
    assert recorded == found.to_json()
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
def test_refusals_of_record(arguments: str, message: str, place: Path, leanconv_command) -> None:
    if "fast" in arguments:
        assert leanconv_command(f"{ACCELERATE} --out fast --quiet")[0] == 0
    code, _, err = leanconv_command(f"{arguments} {QUICK}")
    assert code == 2
    assert message in err
