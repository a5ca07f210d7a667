"""What the report of a saved folder says and advises, and what happens to odd names and missing pieces."""

from __future__ import annotations

import html
import json
import math
import platform
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from markupsafe import escape
from torch import nn

import leanconv
from leanconv.report.advice import advice
from leanconv.report.facts import Facts, facts_of
from leanconv.report.measured import times_of
from leanconv.report.render import page
from leanconv.storage.records import write_record
from tests.support import reports
from tests.support.comparisons import timing
from tests.support.pictures import smooth_images
from tests.support.reports import NASTY, many_layers, record_all

# Fixtures, which pytest looks for by name in this file.
result, folder = reports.result, reports.folder


def test_an_older_folder_gets_a_page_without_curves(result: leanconv.Accelerated, tmp_path: Path) -> None:
    folder = replace(result, spectra=None).save(tmp_path / "older")
    assert not (folder / "spectra.json").exists()
    facts = facts_of(folder)
    # MACs of what was left alone are known together only.
    assert sum(layer.macs_before for layer in facts.layers) == result.macs_before
    text = page(facts)
    assert "saved without the spectra" in text
    assert 'id="what-slider"' not in text
    assert 'id="chart-channel"' not in text
    assert 'id="chart-error"' in text
    assert f"without labels, {result.check}" in words(text)
    assert "without labels, on" not in page(replace(facts, check=None))


def test_records_are_shown(folder: Path, result: leanconv.Accelerated) -> None:
    record_all(folder, result)
    facts = facts_of(folder)
    assert facts.times is not None
    assert facts.accuracy is not None
    assert [layer.name for layer in facts.times.layers] == [layer.name for layer in result.layers]
    for timed, layer in zip(facts.times.layers, result.layers, strict=True):
        assert timed.macs_ratio == pytest.approx(layer.macs_before / layer.macs_after)
        assert timed.ratio.low <= timed.ratio.value <= timed.ratio.high
    top1 = facts.accuracy.scores[0]
    assert top1.lost == pytest.approx((top1.original or 0) - top1.value)
    text = page(facts)
    assert f"{facts.times.measurements[0].ratio.value:.2f}x" in text
    assert "40 images of held-out" in text
    assert 'id="chart-time"' in text


def judged(lost: float, low: float, high: float) -> dict[str, object]:
    """As evaluate --record writes it, for an original that is right on 80 %."""
    change = {"original": 0.8, "other": 0.8 - lost, "increase": lost, "low": low, "high": high}
    return {"top1": change, "top5": change, "images": 200, "data": "val", "agreement": 0.9}


def words(markup: str) -> str:
    """What is read: without tags, a space between pieces."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def section(name: str, facts: Facts) -> str:
    """What is read in one section of a page."""
    return words(re.search(rf'<section[^>]*="{name}".*?</section>', page(facts), re.DOTALL)[0])  # type: ignore[index]


def cards(facts: Facts) -> str:
    return section("In short", facts)


def test_signs_and_ends_of_intervals(folder: Path) -> None:
    found = timing({"torch": (10.0, 4.0)})
    write_record(folder, "bench", found)
    write_record(folder, "evaluation", judged(lost=0.02, low=0.01, high=0.05))
    facts = facts_of(folder)
    shown = cards(facts)
    assert shown.endswith(
        "Measured time 2.50x faster 10.00 → 4.00 ms, torch, batch 1; 95 % interval 2.25 to 2.75 "
        "Accuracy, top-1 -2.00 points 80.0 % → 78.0 %; 95 % interval -5.00 to -1.00"
    )
    assert "torch 1 10.00 4.00 2.50x 2.25 to 2.75" in section("h-time", facts)
    assert "top-1 80.0 % 78.0 % -2.00 -5.00 to -1.00 no" in section("h-accuracy", facts)
    found["measurements"][0]["networks"]["folder"]["noisy"] = True
    write_record(folder, "bench", found)
    assert "95 % interval 2.25 to 2.75, noisy" in cards(facts_of(folder))


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-0.004, 0.009, "within noise: a larger speed-up may cost little"),
        (-0.03, 0.07, "somewhere between -3.00 and +7.00 points: too few images to tell, evaluate on more"),
    ],
)
def test_noise_is_good_news_only_where_it_is_narrow(folder: Path, low: float, high: float, said: str) -> None:
    write_record(folder, "evaluation", judged(0.002, low, high))
    first = advice(facts_of(folder))[0]
    assert said in first.text
    assert ("evaluate" in (first.command or "")) == ("too few" in said)


def test_a_network_that_became_more_expensive_is_called_so() -> None:
    facts = many_layers(3, 8)
    macs = facts.macs_before // 3
    expensive = replace(
        facts,
        layers=[replace(one, macs_after=3 * macs // 2, error=0.1 * (i == 2)) for i, one in enumerate(facts.layers)],
        macs_after=9 * macs // 2,
        parameters_after=4,
        options={**facts.options, "speedup": None, "ranks": {}},
        times=times_of(timing({"torch": (1.0, 4.0)}), Path("many")),
    )
    text = page(expensive)
    assert "<h1>many, 1.50x more MACs</h1>" in text
    assert "<title>many, 1.50x more MACs: leanconv report</title>" in text
    assert cards(expensive).startswith("Multiply-accumulates 1.50x more")
    assert "Parameters 2.00x more" in cards(expensive)
    said = " ".join(one.text for one in advice(expensive))
    assert "MACs fell" not in said
    assert "of what is saved" not in said
    island = json.loads(text.partition('id="facts">')[2].partition("</script>")[0])
    assert island["target"] == 1.05  # where the slider begins
    # Nothing saved at all: no share of it either.
    even = replace(expensive, macs_after=expensive.macs_before)
    assert "has the largest error (0.100)" in " ".join(one.text for one in advice(even))


def test_a_network_judged_alone_and_a_detector(folder: Path) -> None:
    write_record(folder, "evaluation", {"top1": 0.5, "top5": 0.75, "images": 8, "data": "x", "model": "saved"})
    assert "<td>75.0 %</td>" in page(facts_of(folder))
    change = {"original": 0.6, "other": 0.55, "increase": 0.05, "low": 0.01, "high": 0.09, "within_noise": False}
    write_record(folder, "evaluation", {"map": change, "metric": "voc", "images": 8, "data": "x"})
    facts = facts_of(folder)
    assert "-9.00 to -1.00" in page(facts)
    assert any("finetune" in (one.command or "") for one in advice(facts))


def test_names_are_harmless(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 16, 3, padding=1)
            self.parts = nn.ModuleDict({NASTY: nn.Conv2d(16, 16, 3, padding=1)})

        def forward(self, x):
            return torch.relu(self.parts[NASTY](torch.relu(self.first(x))))

    torch.manual_seed(0)
    made = leanconv.accelerate(Named().eval(), smooth_images(4), 1.5, samples=200, progress=False)
    folder = made.save(tmp_path / "a<b>&'\"x")
    text = page(facts_of(folder))
    assert "<script>alert" not in text
    assert escape(f"parts.{NASTY}") in text
    # No element can begin or end inside the data, and it is the same data.
    island = re.search(r'<script type="application/json" id="facts">([^<]*)</script>', text)
    assert island is not None
    assert json.loads(island[1])["layers"][1]["name"] == f"parts.{NASTY}"


def test_an_infinite_error_is_no_end() -> None:
    facts = many_layers(3, 8)
    text = page(replace(facts, layers=[replace(facts.layers[0], error=math.inf), *facts.layers[1:]]))
    assert "Infinity" not in text.partition('id="facts">')[2].partition("</script>")[0]
    assert "<td>inf</td>" in text


def test_two_hundred_layers_fit() -> None:
    assert len(page(many_layers(200, 128)).encode()) < 6e6


def test_the_page_asks_for_nothing_outside(folder: Path) -> None:
    text = page(facts_of(folder))
    assert not re.search(r'(src|href)="(?!#)', text)
    assert "@import" not in text
    assert "url(" not in text


def test_advice_changes_with_what_is_known(folder: Path, result: leanconv.Accelerated) -> None:
    commands = [one.command for one in advice(facts_of(folder)) if one.command]
    assert [command.split()[1] for command in commands] == ["evaluate", "bench"]
    record_all(folder, result)
    assert not any("--data LABELLED" in (one.command or "") for one in advice(facts_of(folder)))


def test_a_folder_is_named_however_it_is_spelt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(folder, "evaluation", judged(0.02, 0.01, 0.05))
    for here, spelt, named in (
        (folder, ".", "../saved-tuned"),
        (folder.parent, "saved/", "saved-tuned"),
        (folder.parent, str(folder), f"{folder}-tuned"),
    ):
        monkeypatch.chdir(here)
        command = advice(facts_of(Path(spelt)))[0].command or ""
        assert command.endswith(f"--out {named}")


def test_what_was_trained_since_is_said(result: leanconv.Accelerated, tmp_path: Path) -> None:
    training = {"history": {}, "settings": {"epochs": 30, "lr": 3e-4, "clip": None}, "distilled": True}
    facts = facts_of(replace(result, training=training).save(tmp_path / "tuned"))
    text = page(facts)
    assert "then fine-tuned to the original" in text
    assert "epochs 30, lr 0.0003, distilled True" in text
    # Errors are those of the layers as they were solved, and so is the command.
    before = "measured before fine-tuning"
    assert text.count(before) == 3  # in a heading, in what is read out for its chart, and in the legend
    assert f"Error behind the activation, {before}" in text
    assert "this made the network before fine-tuning" in section("h-again", facts)
    plain = page(replace(facts, tuned=None))
    assert before not in plain
    assert "before fine-tuning:" not in plain


def test_versions_are_said_as_far_as_they_are_known(
    result: leanconv.Accelerated, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = facts_of(folder).versions
    assert {"leanconv", "torch", "python", "torchvision", "numpy"} <= set(known)
    assert known["python"] == platform.python_version()
    assert ("device" in known) == torch.cuda.is_initialized()
    shown = section("h-again", facts_of(folder))
    assert f"torch {torch.__version__}, python {platform.python_version()}, torchvision {known['torchvision']}" in shown
    # On a GPU, its name; a library that is not installed is left out.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    made = facts_of(result.save(tmp_path / "gpu")).versions
    assert (made["cuda"], made["device"]) == ("13.0", "a GPU")
    old = replace(facts_of(folder), versions={"leanconv": "0.1", "torch": "2.8"})
    assert "made with leanconv 0.1, torch 2.8 images" in section("h-again", old)
