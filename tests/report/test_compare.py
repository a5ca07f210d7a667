"""Several saved results beside one another: their tables, which figures are missing, and which cannot be compared."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

import leanconv
from leanconv.cli.networks import load_network
from leanconv.report.comparison import Comparison, compare
from leanconv.storage.records import write_record
from tests.support.command import ACCELERATE
from tests.support.comparisons import QUICK, evaluation, timing


def test_cost_and_errors_come_from_the_results(saved: Path, made: dict[str, leanconv.Accelerated]) -> None:
    found = {result.folder: result for result in compare(["half", "third"]).results}
    for name, result in found.items():
        errors = [layer.error for layer in made[name].layers]
        assert result.speedup == made[name].speedup
        assert (result.mean_error, result.max_error) == (pytest.approx(sum(errors) / len(errors)), max(errors))
        assert (result.options["scheme"], result.accuracy, result.times) == (made[name].options.scheme, None, None)


def test_the_cheapest_is_last_and_each_is_there_once(saved: Path) -> None:
    found = compare(["third", "half", "third", saved / "half", "./third", "half/../half"])
    assert [result.folder for result in found.results] == ["half", "third"]


def test_errors_before_fine_tuning_are_said_to_be(saved: Path, made: dict[str, leanconv.Accelerated]) -> None:
    training = {"history": {}, "settings": {"epochs": 3}, "distilled": True}
    replace(made["half"], training=training).save("tuned")
    assert "errors of the layers of tuned were measured before fine-tuning" in compare(["half", "tuned"]).remarks
    assert "fine-tuning" not in str(compare(["half"]))


def test_more_is_not_fewer(saved: Path) -> None:
    (result,) = compare(["half"]).results
    expensive = replace(result, macs_after=2 * result.macs_before)
    assert " 2.00x more " in str(Comparison((expensive,), ()))


def test_a_long_name_leaves_the_table_narrow(saved: Path) -> None:
    (result,) = compare(["half"]).results
    long = "/a/folder" * 30 + "/net.py:build"
    text = str(Comparison((replace(result, source=long),), ()))
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
    text = str(compare(["half", "third"]))
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


def test_the_command_that_records_works_as_printed(place: Path, leanconv_command) -> None:
    assert leanconv_command(f"{ACCELERATE} --out fast --quiet")[0] == 0
    _, out, _ = leanconv_command("compare fast")
    (command,) = re.findall(r"record it: leanconv (.*)", out)
    assert command == "evaluate net.py:build fast --data DATA --record"
    code, _, err = leanconv_command(f"{command.replace('DATA', 'photos')} {QUICK} --workers 0")
    assert code == 0, err
    assert "no accuracy" not in leanconv_command("compare fast")[1]


def test_weights_of_the_original_are_part_of_the_command(place: Path, leanconv_command) -> None:
    own = load_network("net.py:build").model
    safetensors.torch.save_file(own.state_dict(), "own.safetensors")
    assert leanconv_command(f"{ACCELERATE} --weights own.safetensors --out fast --quiet")[0] == 0
    _, out, _ = leanconv_command("compare fast")
    assert "leanconv evaluate net.py:build fast --data DATA --weights own.safetensors --record" in out


def test_different_originals_are_said(saved: Path) -> None:
    text = " ".join(compare(["half", "third"]).remarks)
    assert "different networks" not in text
    assert "differ (" not in text
    assert "the originals called torch.nn.modules.container.Sequential differ (" in str(compare(["half", "another"]))


def test_networks_of_different_names_are_said(place: Path, leanconv_command) -> None:
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
        assert said not in str(compare(["half", "third"]))
        write_record(saved / "third", name, second)  # type: ignore[arg-type]
        assert said in str(compare(["half", "third"]))


@pytest.mark.parametrize("data", [{"top1": 1}, {}, {"map": {"original": 1}, "metric": "voc"}])
def test_a_garbled_record_is_refused(data: dict[str, Any], saved: Path, leanconv_command) -> None:
    write_record(saved / "half", "evaluation", data)
    code, _, err = leanconv_command("compare half")
    assert code == 2
    assert "evaluation.json' lacks or garbles" in err
    write_record(saved / "half", "bench", {"measurements": []})
    (saved / "half" / "evaluation.json").unlink()
    code, _, err = leanconv_command("compare half")
    assert code == 2
    assert "bench.json' lacks or garbles" in err
