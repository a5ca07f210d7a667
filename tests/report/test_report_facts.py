"""The facts of a saved folder that a report is made of: layers, spectra, records, and how to repeat the run."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

import leanconv
from leanconv import LeanconvError
from leanconv.report.advice import advice
from leanconv.report.facts import facts_of
from leanconv.report.render import page
from leanconv.storage.records import write_record
from tests.support import reports
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images

# Fixtures, which pytest looks for by name in this file.
result, folder = reports.result, reports.folder


def test_facts_are_those_of_the_result(result: leanconv.Accelerated, folder: Path) -> None:
    facts = facts_of(folder)
    assert sum(layer.macs_before for layer in facts.layers) == result.macs_before == facts.macs_before
    assert sum(layer.macs_after for layer in facts.layers) == result.macs_after
    assert [layer.name for layer in facts.layers] == [
        "0",
        "3",
        "7",
        "10",
    ]  # in the order they run, the first left alone
    assert facts.layers[0].scheme is None
    assert facts.layers[0].reason == result.skipped["0"]
    for ours, theirs in zip(facts.accelerated, result.layers, strict=True):
        assert (ours.name, ours.ranks, ours.energy, ours.error) == (
            theirs.name,
            theirs.ranks,
            theirs.energy,
            theirs.error,
        )
        assert all(1 <= rank <= limit for rank, limit in zip(ours.ranks, ours.limits, strict=True))
    assert facts.skipped == {result.skipped["0"]: ["0"]}
    assert facts.check == result.check is not None
    assert facts.times is None
    assert facts.accuracy is None


def test_kept_spectra_choose_what_accelerate_chooses(result: leanconv.Accelerated, folder: Path) -> None:
    kept = leanconv.load_result(folder, plain_network()).spectra
    assert kept is not None
    for speedup in (1.5, 2.0, 3.0):
        again = leanconv.accelerate(
            plain_network(), smooth_images(), speedup, ranks="energy", samples=500, progress=False
        )
        plan, _ = kept.select(speedup)
        assert {layer.name: layer.ranks for layer in again.layers} == {name: one.ranks for name, one in plan.items()}
    assert kept.reachable == pytest.approx(leanconv.reachable(plain_network(), smooth_images(1)))


def test_spectra_are_checked_but_not_needed(folder: Path, result: leanconv.Accelerated) -> None:
    path = folder / "spectra.json"
    whole = path.read_text()
    path.write_text(whole.replace('"fixed": ', '"fixed":  '))
    with pytest.raises(LeanconvError, match=r"spectra\.json' has \d+ bytes"):
        leanconv.load(folder, plain_network())
    path.write_text(whole.replace("leanconv-spectra", "leanconv-spectrA"))
    with pytest.raises(LeanconvError, match="was changed after it was saved"):
        facts_of(folder)
    path.unlink()
    again = leanconv.load_result(folder, plain_network())
    assert again.spectra is None
    assert again.layers == result.layers


@pytest.mark.parametrize(
    ("name", "content"),
    [("bench", {"measurements": []}), ("evaluation", {"top1": 3}), ("evaluation", {"map": {}, "metric": "voc"})],
)
def test_garbled_records_are_named(folder: Path, name, content) -> None:
    write_record(folder, name, content)
    with pytest.raises(LeanconvError, match=rf"{name}\.json' lacks or garbles .*--record"):
        facts_of(folder)


def test_how_to_repeat(result: leanconv.Accelerated, folder: Path, tmp_path: Path) -> None:
    facts = facts_of(folder)
    call = "leanconv.accelerate(model, images, speedup=2.0, scheme='3d', ranks='energy', samples=500)"
    assert facts.repeat == call
    assert facts.another == call.replace("2.0", "{speedup}")
    typed = "leanconv accelerate net.py:build --weights w.pth --speedup=2 --ranks energy --images a --out"
    facts = facts_of(replace(result, command=[*typed.split(), "my folder"]).save(tmp_path / "typed"))
    assert facts.repeat == f"{typed} 'my folder'"
    assert facts.another == (
        "leanconv accelerate net.py:build --weights w.pth --images a --out 'my folder'-{speedup}x --ranks energy "
        "--speedup {speedup}"
    )
    assert (facts.original, facts.original_options) == ("net.py:build", ("--weights", "w.pth"))
    assert "evaluate net.py:build" in (advice(facts)[0].command or "")
    slash = replace(result, command=[*typed.split(), "slash/"]).save(tmp_path / "slash")
    assert "--out slash-{speedup}x" in facts_of(slash).another


def test_the_command_for_another_speed_up_gives_the_ranks_that_the_page_shows(
    result: leanconv.Accelerated, tmp_path: Path
) -> None:
    """Those of ranks="energy", whatever was typed; other options stay."""
    for number, words in enumerate(("", "--paper", "--ranks sensitivity --threads 2", "--ranks=auto --refine none")):
        typed = f"leanconv accelerate net.py:build --images a {words}".split()
        options = replace(result.options, ranks="auto")
        facts = facts_of(replace(result, options=options, command=typed).save(tmp_path / str(number)))
        kept = re.sub(r"--ranks[ =]\w+ ?", "", words)
        wanted = ["leanconv accelerate net.py:build --images a", kept, "--ranks energy --speedup {speedup}"]
        assert facts.another == " ".join(filter(None, wanted))
    called = facts_of(replace(result, options=options).save(tmp_path / "called"))
    assert "ranks='energy'" in called.another
    assert "ranks=" not in called.repeat  # the default


def test_a_page_says_that_its_run_may_have_other_ranks(result: leanconv.Accelerated, folder: Path) -> None:
    facts = facts_of(folder)
    said = "ranks by sensitivity where that is possible"
    assert said not in page(facts)
    assert said in " ".join(page(replace(facts, options={**facts.options, "ranks": "auto"})).split())


def test_steps_are_repeated(result: leanconv.Accelerated, tmp_path: Path) -> None:
    options = replace(result.options, refine="distill", steps=9)
    told = facts_of(replace(result, options=options).save(tmp_path / "longer")).repeat
    assert told.endswith("samples=500, refine='distill', steps=9)")


def test_ranks_by_time_are_repeated_by_energy(result: leanconv.Accelerated, tmp_path: Path) -> None:
    options = replace(result.options, ranks="latency", speedup=3.0, target=leanconv.Target(runtime="onnxruntime"))
    called = facts_of(replace(result, options=options).save(tmp_path / "called"))
    assert called.another == (
        "leanconv.accelerate(model, images, speedup={speedup}, scheme='3d', ranks='energy', samples=500)"
    )
    assert "ranks='latency'" in called.repeat
    words = [
        "leanconv",
        "accelerate",
        "vgg16",
        "--ranks",
        "latency",
        "--runtime",
        "onnxruntime",
        "--threads=1",
        "--images",
        "a",
    ]
    typed = facts_of(replace(result, options=options, command=words).save(tmp_path / "typed"))
    assert typed.another == "leanconv accelerate vgg16 --images a --ranks energy --speedup {speedup}"
    # 3x was asked of the clock; the slider, which is for MACs, starts at what was reached of these.
    assert f'"target":{math.floor(20 * result.speedup) / 20:g}' in page(called)
