"""samples="auto": how many responses a layer needs, by its error on images it was not fitted to."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leanconv
from leanconv import LeanconvError
from leanconv.config import MOST, Options
from leanconv.forms.fit import samples_needed
from leanconv.report import write_report
from leanconv.result import Accelerated
from leanconv.storage import folder as storage
from tests.support.command import COMMON
from tests.support.equality import assert_equal, relative
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images
from tests.support.workdirs import killed_after, original_is_not_measured, run


def auto(images: Tensor | None = None, model: nn.Module | None = None, **other: Any) -> Accelerated:
    given = smooth_images(48) if images is None else images
    arguments = {"speedup": 2.0, "samples": "auto", "progress": False, **other}
    return leanconv.accelerate(model or plain_network(), given, **arguments)


def response_errors(model: nn.Module, accelerated: nn.Module, images: Tensor) -> list[float]:
    """Behind every activation."""
    found: list[list[Tensor]] = []
    for network in (model, accelerated):
        seen: list[Tensor] = []
        handles = [
            layer.register_forward_hook(lambda _, __, output, seen=seen: seen.append(output.clone()))
            for layer in network.modules()
            if isinstance(layer, nn.ReLU)
        ]
        with torch.no_grad():
            network(images)
        for handle in handles:
            handle.remove()
        found.append(seen)
    return [relative(b, a) for a, b in zip(*found, strict=True)]


def test_errors_on_unseen_images_are_no_worse_than_with_few_samples() -> None:
    model, images, unseen = plain_network(), smooth_images(64, 32), smooth_images(64, 32, seed=1)
    found = auto(images, model, ranks="energy")
    ranks = {layer.name: layer.ranks for layer in found.layers}
    few = auto(images, model, ranks=ranks, samples=2000)
    pairs = zip(response_errors(model, found.model, unseen), response_errors(model, few.model, unseen), strict=True)
    assert all(a <= 1.005 * b for a, b in pairs)
    assert all(2000 <= layer.samples < 64 * 32 * 32 and layer.enough for layer in found.layers)
    assert all(layer.samples >= 2000 for layer in few.layers)


@pytest.mark.parametrize("arguments", [{}, {"asymmetric": False}, {"refine": "none"}, {"solver": "linear"}])
def test_a_layer_is_fitted_to_what_is_reported(arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, tuple[int, int]] = {}

    def spy(probe: Any, choice: Any, *, target: Any, inputs: Any, **more: Any) -> Any:
        seen[probe.site.name] = len(target.y), len(inputs.y)
        return usual(probe, choice, target=target, inputs=inputs, **more)

    solving = importlib.import_module("leanconv.pipeline.solve_layers")
    usual = solving.fit_layer
    monkeypatch.setattr(solving, "fit_layer", spy)
    result = auto(**arguments)
    assert seen == {layer.name: (layer.samples, layer.samples) for layer in result.layers}
    assert {layer.enough for layer in result.layers} <= {True, False}


def test_free_filters_have_more_unknowns_and_need_more_samples() -> None:
    images, model = smooth_images(100), plain_network()
    tied, free = (auto(images, model, ranks="energy", refine=refine) for refine in ("none", "closed-form"))
    assert [layer.ranks for layer in tied.layers] == [layer.ranks for layer in free.layers]
    assert sum(layer.samples for layer in free.layers) > sum(layer.samples for layer in tied.layers)


def test_as_many_active_responses_are_needed_through_an_activation() -> None:
    # Of the first layer the linear solver's input and the nonlinear one's are the same.
    images, model = smooth_images(200), plain_network()
    linear, nonlinear = (auto(images, model, solver=solver).layers[0] for solver in ("linear", "nonlinear"))
    assert linear.enough
    rows = []
    model[5].register_forward_hook(lambda _, __, output: rows.append(output.clone()))
    with torch.no_grad():
        model(images)
    active = float((rows[0] > 0).float().mean())
    assert 0.2 < active < 0.8
    assert nonlinear.samples == pytest.approx(linear.samples / active, rel=0.05)


def test_too_few_images_are_said_in_a_line() -> None:
    result = auto(refine="closed-form")
    short = [layer for layer in result.layers if layer.enough is False]
    assert short
    assert str(result).splitlines()[-1] == f"{len(short)} of 3 layers would gain from more samples; give more images."
    assert all(layer.samples == (48 - 8) * 64 for layer in short)  # 8 are held out
    sated = replace(result, layers=[replace(layer, enough=True) for layer in result.layers])
    assert "more samples" not in str(sated)


def test_no_layer_is_thinned_on_too_few_images_to_judge_by() -> None:
    result = auto(smooth_images(7, 32))
    assert [layer.samples for layer in result.layers] == [7 * 1024, 7 * 256, 7 * 256]
    assert {layer.enough for layer in result.layers} == {None}


def test_grouped_and_residual_layers_are_looked_at() -> None:
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.grouped = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1, groups=2)
            self.last = nn.Conv2d(32, 32, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).relu()
            return (x + self.last(self.grouped(x).relu())).relu()

    for asymmetric in (True, False):
        result = auto(model=Residual().eval(), scheme="channel", asymmetric=asymmetric)
        assert [layer.name for layer in result.layers] == ["grouped", "last"]
        assert all(layer.enough and 2000 <= layer.samples < 48 * 256 for layer in result.layers)


def test_without_a_fit_nothing_is_looked_at() -> None:
    assert {(layer.samples, layer.enough) for layer in auto(scheme="spatial").layers} == {(0, None)}


def test_a_layer_on_other_rows_than_images_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four crops of every image run as one batch: a layer has other rows than images."""
    seen: list[int] = []

    def spy(*given: Any, target: Any, holdout: Any, **more: Any) -> Any:
        seen.append(len(target.y) - len(holdout.fitted) - len(holdout.held))
        return samples_needed(*given, target=target, holdout=holdout, **more)

    monkeypatch.setattr(importlib.import_module("leanconv.pipeline.solve_layers"), "samples_needed", spy)

    class Crops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = plain_network()

        def forward(self, x: Tensor) -> Tensor:
            rows = torch.cat([x[:, :, i : i + 12, j : j + 12] for i in (0, 4) for j in (0, 4)])
            return self.body(rows)

    result = auto(model=Crops().eval())
    assert all(seen)  # rows around those held out are on neither side: whose they are is a guess
    assert len(seen) == 3
    assert all(layer.enough is not None for layer in result.layers)


REFUSED = ["many", "Auto", 0, -1, 2.5, True, None]


@pytest.mark.parametrize("given", REFUSED, ids=str)
def test_other_words_and_numbers_are_refused(given: Any) -> None:
    with pytest.raises(LeanconvError) as caught:
        auto(samples=given)
    assert str(caught.value) == f"samples={given!r} must be a whole number from 1 on, or 'auto'."


def test_options_keep_the_word() -> None:
    options = Options.check(samples="auto")
    assert options.most_samples == MOST
    assert options.to_json()["samples"] == "auto"
    assert Options.from_json(json.loads(json.dumps(options.to_json()))) == replace(options, speedup=4.0)
    assert Options.check(samples=7).most_samples == 7
    with pytest.raises(LeanconvError, match="samples=1099511627776 must be a whole number from 1 to"):
        Options.check(samples=1 << 40)


def test_what_was_found_is_saved_and_older_folders_load(tmp_path: Path) -> None:
    result = auto(refine="closed-form")
    folder = result.save(tmp_path / "net")
    again = leanconv.load_result(folder, plain_network())
    assert again.layers == result.layers
    assert again.options == result.options
    assert "as many as needed responses sampled a layer" in " ".join(write_report(folder).read_text().split())
    path = folder / storage.DESCRIPTION
    data = json.loads(path.read_text())
    assert [(layer["samples"], layer["enough"]) for layer in data["layers"]] == [
        (layer.samples, layer.enough) for layer in result.layers
    ]
    for layer in data["layers"]:
        del layer["samples"], layer["enough"]
    del data["sha256"]
    path.write_text(json.dumps({**data, "sha256": storage._digest(data)}))
    old = leanconv.load_result(folder, plain_network())
    assert old.layers == [replace(layer, samples=0, enough=None) for layer in result.layers]


@pytest.mark.parametrize("arguments", [{}, {"asymmetric": False}, {"refine": "none"}], ids=str)
def test_a_run_goes_on_where_it_stopped(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"samples": "auto", "images": smooth_images(48), **arguments}
    whole = run(None, **given)
    assert all(layer.enough is not None for layer in whole.layers)
    killed_after(2, monkeypatch, tmp_path, **given)
    original_is_not_measured(monkeypatch)
    assert_equal(whole, run(tmp_path, **given))
    assert_equal(whole, run(tmp_path, **given))  # finished: all of it is read
    with pytest.raises(LeanconvError, match="samples='auto', but samples=2000 was given"):
        run(tmp_path, **{**given, "samples": 2000})


ACCELERATE = f"accelerate net.py:build --images photos --speedup 2 --out fast {COMMON}"


@pytest.mark.usefixtures("place")
def test_the_command_line(leanconv_command) -> None:
    code, out, err = leanconv_command(f"{ACCELERATE} --samples auto --json --quiet --report")
    assert code == 0, err
    found = json.loads(out)
    assert found["options"]["samples"] == "auto"
    assert [layer["samples"] for layer in found["layers"]] == [
        8 * 16 * 16 if layer["enough"] is False else 2000 for layer in found["layers"]
    ]
    assert {layer["enough"] for layer in found["layers"]} <= {True, False}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("given", ["many", "0"])
def test_the_command_line_refuses_other_words(given: str, leanconv_command) -> None:
    code, _, err = leanconv_command(f"{ACCELERATE} --samples {given}")
    assert code == 2
    assert "must be a whole number from 1 on, or 'auto'." in err
