"""The report of a saved folder: its facts, what happens to odd names and missing pieces, and the command."""

from __future__ import annotations

import errno
import html
import json
import math
import os
import platform
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import leanconv
from leanconv import LeanconvError
from leanconv.bench.comparison import bench
from leanconv.cli.main import run
from leanconv.evaluate.compare import compare
from leanconv.network.geometry import Cost, Geometry
from leanconv.options import Options
from leanconv.ranks import Candidate, KeptSpectra
from leanconv.ranks.candidates import Energies
from leanconv.ranks.portable import log
from leanconv.records import write_record
from leanconv.report import page as page_module
from leanconv.report import write_report
from leanconv.report.advice import advice
from leanconv.report.facts import Facts, LayerFacts, facts_of
from leanconv.report.head import cards
from leanconv.report.measured import times_of
from leanconv.report.page import page
from leanconv.report.sections import accuracy, error_label, legend, repeated, times
from tests.conftest import plain_network, smooth_images
from tests.test_cli import NETWORK
from tests.test_compare import timing
from tests.test_images import write_picture

NASTY = "<script>alert(1)</script>&<b>'\"x"


@pytest.fixture(scope="module")
def result() -> leanconv.Accelerated:
    return leanconv.accelerate(plain_network(), smooth_images(), 2.0, samples=500, progress=False)


@pytest.fixture
def folder(result: leanconv.Accelerated, tmp_path: Path) -> Path:
    return result.save(tmp_path / "saved")


def record_all(folder: Path, result: leanconv.Accelerated) -> None:
    """What bench and evaluate --record leave in a folder."""
    networks = {"original": plain_network(), "saved": result.model}
    found = bench(networks, shape=(3, 16, 16), seconds=0.02, layers=True, progress=False, threads=1)
    write_record(folder, "bench", found.to_json())
    images, labels = smooth_images(40, seed=1), torch.arange(40) % 10
    with torch.no_grad():
        comparison = compare(networks["original"](images), result.model(images), labels, original="a", other="b")
    write_record(folder, "evaluation", {**comparison.to_json(), "data": "held-out", "views": 1, "unreadable": []})


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
    assert facts.times is None
    assert facts.accuracy is None


def test_kept_spectra_choose_what_accelerate_chooses(result: leanconv.Accelerated, folder: Path) -> None:
    kept = leanconv.load_result(folder, plain_network()).spectra
    assert kept is not None
    for speedup in (1.5, 2.0, 3.0):
        again = leanconv.accelerate(plain_network(), smooth_images(), speedup, samples=500, progress=False)
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


def test_signs_and_ends_of_intervals(folder: Path) -> None:
    found = timing({"torch": (10.0, 4.0)})
    write_record(folder, "bench", found)
    write_record(folder, "evaluation", judged(lost=0.02, low=0.01, high=0.05))
    facts = facts_of(folder)
    shown = words(cards(facts))
    assert shown.endswith(
        "Measured time 2.50x faster 10.00 → 4.00 ms, torch, batch 1; 95 % interval 2.25 to 2.75 "
        "Accuracy, top-1 -2.00 points 80.0 % → 78.0 %; 95 % interval -5.00 to -1.00"
    )
    assert "torch 1 10.00 4.00 2.50x 2.25 to 2.75" in words(times(facts))
    assert "top-1 80.0 % 78.0 % -2.00 -5.00 to -1.00 no" in words(accuracy(facts))
    found["measurements"][0]["networks"]["folder"]["noisy"] = True
    write_record(folder, "bench", found)
    assert "95 % interval 2.25 to 2.75, noisy" in words(cards(facts_of(folder)))


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-0.004, 0.009, "within noise: a larger speed-up may be had"),
        (-0.03, 0.07, "somewhere between -3.00 and +7.00 points: too few images to tell, evaluate on more"),
    ],
)
def test_noise_is_good_news_only_where_it_is_narrow(folder: Path, low: float, high: float, said: str) -> None:
    write_record(folder, "evaluation", judged(0.002, low, high))
    first = advice(facts_of(folder))[0]
    assert said in first.text
    assert ("evaluate" in (first.command or "")) == ("too few" in said)


def test_a_network_that_became_dearer_is_called_so() -> None:
    facts = many_layers(3, 8)
    macs = facts.macs_before // 3
    dearer = replace(
        facts,
        layers=[replace(one, macs_after=3 * macs // 2, error=0.1 * (i == 2)) for i, one in enumerate(facts.layers)],
        macs_after=9 * macs // 2,
        parameters_after=4,
        options={**facts.options, "speedup": None, "ranks": {}},
        times=times_of(timing({"torch": (1.0, 4.0)}), Path("many")),
    )
    text = page(dearer)
    assert "<h1>many, 1.50x dearer in MACs</h1>" in text
    assert "<title>many, 1.50x dearer: leanconv report</title>" in text
    assert words(cards(dearer)).startswith("Multiply-accumulates 1.50x dearer")
    assert "Parameters 2.00x more" in words(cards(dearer))
    said = " ".join(one.text for one in advice(dearer))
    assert "MACs fell" not in said
    assert "of what is saved" not in said
    island = json.loads(text.partition('id="facts">')[2].partition("</script>")[0])
    assert island["target"] == 1.05  # where the slider begins
    # Nothing saved at all: no share of it either.
    even = replace(dearer, macs_after=dearer.macs_before)
    assert "has the largest error (0.100)" in " ".join(one.text for one in advice(even))


@pytest.mark.parametrize(
    ("name", "content"),
    [("bench", {"measurements": []}), ("evaluation", {"top1": 3}), ("evaluation", {"map": {}, "metric": "voc"})],
)
def test_garbled_records_are_named(folder: Path, name, content) -> None:
    write_record(folder, name, content)
    with pytest.raises(LeanconvError, match=rf"{name}\.json' lacks or garbles .*--record"):
        facts_of(folder)


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
    assert html.escape(f"parts.{NASTY}") in text
    # No element can begin or end inside the data, and it is the same data.
    island = re.search(r'<script type="application/json" id="facts">([^<]*)</script>', text)
    assert island is not None
    assert json.loads(island[1])["layers"][1]["name"] == f"parts.{NASTY}"


def many_layers(count: int, width: int) -> Facts:
    """Facts of a network nobody would run in a test."""
    geometry = Geometry(kind="conv2d", in_channels=width, out_channels=width, kernel=(3, 3), padding=(1, 1))
    cost = Cost.of(geometry, (14, 14), (14, 14))
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(3 * width, generator=generator, dtype=torch.float64).sort(descending=True).values.tolist()
    names = [f"features.stage.{i}.conv" for i in range(count)]
    kept = KeptSpectra(
        scheme="3d",
        candidates=tuple(
            Candidate(
                name=name, geometry=geometry, cost=cost, channel=Energies(values[:width]), spatial=Energies(values)
            )
            for name in names
        ),
        pairs=[],
        fixed=0,
        counted=dict.fromkeys(names, cost.dense),
    )
    layers = [
        LayerFacts(
            name=name,
            macs_before=cost.dense,
            macs_after=cost.both(9, 9),
            scheme="3d",
            ranks=(9, 9),
            limits=(3 * width, width),
            energy=0.9,
            filters_energy=0.8,
            error=0.1,
        )
        for name in names
    ]
    return Facts(
        folder="many",
        network="many",
        original="MODEL",
        weights=None,
        macs_before=count * cost.dense,
        macs_after=count * cost.both(9, 9),
        parameters_before=2,
        parameters_after=1,
        images=1,
        layers=layers,
        skipped={},
        options=Options.check().to_json(),
        repeat="",
        another="",
        typed=False,
        versions={},
        seconds={},
        tuned=None,
        times=None,
        accuracy=None,
        spectra=kept,
    )


def test_an_infinite_error_is_no_end() -> None:
    facts = many_layers(3, 8)
    text = page(replace(facts, layers=[replace(facts.layers[0], error=math.inf), *facts.layers[1:]]))
    assert "Infinity" not in text.partition('id="facts">')[2].partition("</script>")[0]
    assert "<td>inf</td>" in text


def test_two_hundred_layers_fit() -> None:
    assert len(page(many_layers(200, 256)).encode()) < 6e6


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


def test_how_to_repeat(result: leanconv.Accelerated, folder: Path, tmp_path: Path) -> None:
    facts = facts_of(folder)
    assert facts.repeat == "leanconv.accelerate(model, images, speedup=2.0, scheme='3d', samples=500)"
    assert facts.another == "leanconv.accelerate(model, images, speedup={speedup}, scheme='3d', samples=500)"
    typed = "leanconv accelerate net.py:build --weights w.pth --speedup=2 --ranks energy --images a --out"
    facts = facts_of(replace(result, command=[*typed.split(), "my folder"]).save(tmp_path / "typed"))
    assert facts.repeat == f"{typed} 'my folder'"
    assert facts.another == (
        "leanconv accelerate net.py:build --weights w.pth --images a --out 'my folder'-{speedup}x --speedup {speedup}"
    )
    assert (facts.original, facts.weights) == ("net.py:build", "w.pth")
    assert "evaluate net.py:build" in (advice(facts)[0].command or "")
    slash = replace(result, command=[*typed.split(), "slash/"]).save(tmp_path / "slash")
    assert "--out slash-{speedup}x" in facts_of(slash).another


def test_steps_are_repeated(result: leanconv.Accelerated, tmp_path: Path) -> None:
    options = replace(result.options, refine="distill", steps=9)
    told = facts_of(replace(result, options=options).save(tmp_path / "longer")).repeat
    assert told.endswith("samples=500, refine='distill', steps=9)")


def test_ranks_by_time_are_repeated_by_energy(result: leanconv.Accelerated, tmp_path: Path) -> None:
    options = replace(result.options, ranks="latency", speedup=3.0, target=leanconv.Target(runtime="onnxruntime"))
    called = facts_of(replace(result, options=options).save(tmp_path / "called"))
    assert called.another == "leanconv.accelerate(model, images, speedup={speedup}, scheme='3d', samples=500)"
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
    assert typed.another == "leanconv accelerate vgg16 --images a --speedup {speedup}"
    # 3x was asked of the clock; the slider, which is for MACs, starts at what was reached of these.
    assert f'"target":{math.floor(20 * result.speedup) / 20:g}' in page(called)


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
    assert before in legend(facts)
    assert before in error_label(facts)
    assert f"Error behind the activation, {before}" in text
    assert "this made the network before fine-tuning" in words(repeated(facts))
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
    shown = words(repeated(facts_of(folder)))
    assert f"torch {torch.__version__}, python {platform.python_version()}, torchvision {known['torchvision']}" in shown
    # On a GPU, its name; a library that is not installed is left out.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    made = facts_of(result.save(tmp_path / "gpu")).versions
    assert (made["cuda"], made["device"]) == ("13.0", "a GPU")
    old = replace(facts_of(folder), versions={"leanconv": "0.1", "torch": "2.8"})
    assert "made with leanconv 0.1, torch 2.8 images" in words(repeated(old))


def test_only_reports_are_replaced(folder: Path, tmp_path: Path) -> None:
    first = write_report(folder)
    assert first == folder / "report.html"
    assert write_report(folder) == first
    assert leanconv.load(folder, plain_network()) is not None  # the page is no part of what is checked
    other = tmp_path / "other.html"
    other.write_text("<p>mine</p>")
    with pytest.raises(LeanconvError, match="exists and is no report of leanconv"):
        write_report(folder, other)
    assert other.read_text() == "<p>mine</p>"
    with pytest.raises(LeanconvError, match="is a folder; give the name of a file"):
        write_report(folder, tmp_path)
    with pytest.raises(LeanconvError, match="is not a folder you may write to"):
        write_report(folder, other / "report.html")
    with pytest.raises(LeanconvError, match="is not a folder; give one that"):
        write_report(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_full_disk_leaves_the_old_report(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_report(folder)
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for place in (path, tmp_path / "new" / "report.html"):
        with pytest.raises(LeanconvError, match="No space left on device; nothing was changed"):
            write_report(folder, place)
    assert path.read_bytes() == before
    assert not (tmp_path / "new").exists()
    assert [item.name for item in folder.iterdir() if item.name.startswith(".")] == []


def test_without_plotly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page_module.plotly_js.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(LeanconvError, match=r"plotly is not installed; pip install 'leanconv\[report\]'"):
        write_report(folder)


def call(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["leanconv", *arguments])
    with pytest.raises(SystemExit) as caught:
        run()
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


def test_the_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    code, out, _ = call(["report", str(folder)], monkeypatch, capsys)
    assert code == 0
    assert out.startswith(f"{folder / 'report.html'}: ")
    target = tmp_path / "deep" / "page.html"
    code, out, _ = call(["report", str(folder), "--out", str(target), "--json"], monkeypatch, capsys)
    assert code == 0
    assert json.loads(out) == {"report": str(target), "bytes": target.stat().st_size}
    code, out, err = call(["report", str(tmp_path)], monkeypatch, capsys)
    assert code == 2
    assert "has no leanconv.json" in err
    assert err.count("\n") == 1


def test_accelerate_writes_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "net.py").write_text(NETWORK)
    for number in range(4):
        write_picture(tmp_path / "photos" / f"{number}.png", 30 + 60 * number)
    monkeypatch.chdir(tmp_path)
    words = "accelerate net.py:build --images photos --size 16 --speedup 1.5 --samples 200 --out net-1.5x --report -q"
    code, out, err = call([*words.split(), "--workers", "0"], monkeypatch, capsys)
    assert code == 0, err
    assert "report: net-1.5x/report.html, open it in a browser" in out
    facts = facts_of(Path("net-1.5x"))
    assert facts.typed
    assert facts.repeat == f"leanconv {words} --workers 0"
    assert html.escape(facts.repeat) in Path("net-1.5x/report.html").read_text()


def test_the_portable_logarithm_is_one() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(2000, generator=generator, dtype=torch.float64)
    for x in [*values.tolist(), *(1 - 1e-9 * values).tolist(), *(10.0 ** (-300 * values)).tolist(), 1e-300, 0.5, 2.0]:
        assert abs(log(x) - math.log(x)) <= 4 * math.ulp(math.log(x))
    assert log(1.0) == 0.0
