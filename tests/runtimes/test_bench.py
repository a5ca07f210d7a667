"""Timing networks side by side, layer by layer, and from the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import leanconv
from leanconv.cli.main import run
from leanconv.runtimes.bench.comparison import bench
from leanconv.runtimes.bench.layers import layer_times, replaced
from leanconv.runtimes.runners import RUNTIMES, Conditions
from tests.support.pictures import smooth_images

NETWORK = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 2),
    )

def grey():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["leanconv", *arguments])
    with pytest.raises(SystemExit) as end:
        run()
    return int(end.value.code or 0)


# Both networks


def test_two_networks_side_by_side(accelerated: tuple[nn.Module, leanconv.Accelerated]) -> None:
    model, result = accelerated
    before, state = torch.get_num_threads(), {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    found = bench(
        {"original": model, "accelerated": result.model},
        shape=(3, 16, 16),
        batches=[1, 4],
        threads=1,
        seconds=0.05,
        layers=True,
        progress=False,
    )
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert [(one.runtime, one.batch) for one in found.measurements] == [("torch", 1), ("torch", 4)]
    for one in found.measurements:
        assert one.ratio is not None
        assert one.ratio.value == pytest.approx(one.times["original"].median / one.times["accelerated"].median)
        assert one.ratio.low <= one.ratio.value <= one.ratio.high
    assert found.macs is not None
    # The last layer of the network is linear, not counted by accelerate: 32 x 10.
    assert found.macs == {"original": result.macs_before + 320, "accelerated": result.macs_after + 320}
    for layers in found.layers.values():
        reported = {layer.name: (layer.macs_before, layer.macs_after) for layer in result.layers}
        assert {layer.name: (layer.macs_before, layer.macs_after) for layer in layers} == reported
    text = str(found)
    assert "layer by layer, torch, batch 4" in text
    assert json.loads(json.dumps(found.to_json()))["measurements"][1]["batch"] == 4


def test_only_layers_that_differ_are_timed(accelerated: tuple[nn.Module, leanconv.Accelerated]) -> None:
    model, result = accelerated
    assert replaced(model, model) == []
    assert layer_times(model, model, smooth_images(1), seconds=0.1) == []
    assert replaced(model, result.model) == [layer.name for layer in result.layers]
    layer_times(model, result.model, smooth_images(1), seconds=0.01)
    assert not any(module._forward_pre_hooks for module in (*model.modules(), *result.model.modules()))


def test_a_detector_is_given_lists_of_images() -> None:
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    torch.manual_seed(0)
    model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=2, score_thresh=0.9)
    found = bench({"ssd": model}, shape=(3, 64, 64), batches=[2], seconds=0.05, progress=False)
    assert found.macs is None
    assert found.measurements[0].batch == 2
    assert found.conditions["input"] == "lists of images of 3 x 64 x 64"
    with pytest.raises(leanconv.LeanconvError, match="does not run detectors"):
        RUNTIMES["torch-cudagraph"].refuse(model, Conditions(device=torch.device("cuda")))
    with pytest.raises(leanconv.LeanconvError, match="no detectors"):
        bench({"ssd": model, "again": model}, shape=(3, 64, 64), layers=True, progress=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"runtimes": ["torchh"]}, "did you mean torch"),
        ({"runtimes": ["torch-cudagraph"]}, "GPU only"),
        ({"runtimes": ["torch-kernels"]}, "torch-kernels cannot run here: .* NVIDIA GPU, and the network is on cpu"),
        ({"dtype": "int8"}, "use float32, bfloat16, float16"),
        ({"seconds": 0.0}, "above 0"),
        ({"batches": [0]}, "whole number from 1"),
        ({"threads": 0}, "whole number from 1"),
        ({"layers": True}, "two networks"),
        ({"shape": (1, 16, 16)}, "takes 3 input channels but was given 1"),
    ],
)
def test_refusals(arguments: dict[str, Any], said: str, network: nn.Module) -> None:
    with pytest.raises(leanconv.LeanconvError, match=said):
        bench({"a": network}, **{"shape": (3, 16, 16), "progress": False, **arguments})


# The command


def test_the_command_times_a_network_and_a_folder(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from leanconv.cli.networks import load_network

    model = load_network("net.py:build").model.eval()
    leanconv.accelerate(model, smooth_images(8), 2, solver="linear", samples=200, progress=False).save("lean")
    quick = ("--size", "16", "--seconds", "0.2", "--threads", "1", "--device", "cpu")
    assert (
        command(monkeypatch, "bench", "net.py:build", "lean", "--batch", "1", "--batch", "2", "--layers", *quick) == 0
    )
    out = capsys.readouterr().out
    assert "torch, batch 2: " in out
    assert "all replaced layers: " in out
    assert "1 thread of" in out

    assert command(monkeypatch, "bench", "lean", "--model", "net.py:build", "--json", "-q", *quick) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["networks"] == ["net.py:build", "lean"]
    assert found["machine"]["threads"] == 1
    for name in found["networks"]:
        figures = found["measurements"][0]["networks"][name]
        assert figures["low_ms"] <= figures["median_ms"] <= figures["high_ms"]
        assert figures["images_per_second"] == pytest.approx(1000 / figures["median_ms"])
        assert figures["peak_memory_bytes"] > 0

    assert command(monkeypatch, "bench", "lean", *quick) == 2
    assert "--model file.py:callable" in capsys.readouterr().err


def test_the_original_of_a_folder_is_built_by_name(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = leanconv.models.character_cnn()
    images = torch.rand(8, 1, 32, 32)
    leanconv.accelerate(model, images, 2, "channel", solver="linear", samples=100, progress=False).save("lean")
    assert command(monkeypatch, "bench", "lean", "--seconds", "0.1", "--channels", "1", "--size", "32", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["networks"] == ["leanconv:character_cnn", "lean"]
    assert any("random weights" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("net.py:build", "--runtime", "tensorrt"), "--runtime names the runtime 'tensorrt'"),
        (("net.py:build", "--model", "net.py:grey"), "goes with a saved folder"),
        (("net.py:grey", "--size", "16"), "takes 1 input channels but was given 3"),
        (("net.py:build", "--batch", "0"), "'--batch'"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    assert command(monkeypatch, "bench", *arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1
