"""Timing: the statistics on made-up times, the order of calls, the runtimes' answers, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import leanconv
from leanconv.bench import runtimes
from leanconv.bench.comparison import bench
from leanconv.bench.layers import layer_times, replaced
from leanconv.bench.machine import machine, threads_set
from leanconv.bench.measure import LEAST, WINDOW, interleaved, paired_ratio, settled, timing
from leanconv.bench.memory import peak_bytes
from leanconv.bench.runtimes import RUNTIMES, Conditions
from leanconv.cli.main import run
from tests.conftest import plain_network, smooth_images

CPU = Conditions(device=torch.device("cpu"))

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


class FakeClock:
    """Time that passes only when something is said to take it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: float, calls: list[str], name: str) -> Any:
        def call() -> None:
            calls.append(name)
            self.now += seconds

        return call


@pytest.fixture(scope="module")
def accelerated() -> tuple[nn.Module, leanconv.Accelerated]:
    model = plain_network()
    return model, leanconv.accelerate(model, smooth_images(), 2, solver="linear", samples=200, progress=False)


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


# Statistics


def test_times_that_never_vary_have_no_interval_and_no_noise() -> None:
    found = timing([0.25] * 9)
    assert (found.median, found.low, found.high, found.spread, found.noisy) == (0.25, 0.25, 0.25, 0.0, False)


def test_the_spread_is_the_interquartile_range_over_the_median() -> None:
    found = timing([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.median == 3.0
    assert found.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert found.noisy
    assert found.low >= 1.0
    assert found.high <= 5.0
    assert found.low < found.median < found.high


def test_the_interval_of_a_median_holds_the_true_one_about_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(200, 40, generator=generator) * 0.1 + 1).tolist()
    found = [timing(times) for times in drawn]
    share = sum(one.low <= 1.0 <= one.high for one in found) / len(found)
    assert 0.9 <= share <= 0.995


def test_what_slows_both_down_cancels_in_the_ratio() -> None:
    moods = [1.0, 3.0, 1.5, 2.0, 10.0, 1.2, 1.1]
    found = paired_ratio([4 * mood for mood in moods], moods)
    assert found.value == pytest.approx(4)
    assert (found.low, found.high) == pytest.approx((4, 4))
    shuffled = paired_ratio([4 * mood for mood in moods], moods[::-1][3:] + moods[::-1][:3])
    assert shuffled.low < 4 < shuffled.high


def test_the_same_times_give_the_same_interval() -> None:
    times = [1.0, 1.3, 0.9, 1.1, 1.2, 1.05]
    assert timing(times) == timing(times)


def test_falling_times_are_not_settled() -> None:
    assert not settled([8.0, 7.0, 6.0, 5.0, 4.0, 3.0])
    assert not settled([1.0] * (2 * WINDOW - 1))
    assert settled([9.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert settled([1.0, 1.0, 1.0, 1.2, 1.2, 1.2])


# Taking turns


def test_every_round_has_everyone_once_and_the_order_is_drawn() -> None:
    clock, calls = FakeClock(), []
    found = interleaved(
        {"a": clock.taking(0.01, calls, "a"), "b": clock.taking(0.02, calls, "b")}, seconds=3, clock=clock
    )
    rounds = [tuple(calls[i : i + 2]) for i in range(0, len(calls), 2)]
    assert all(sorted(one) == ["a", "b"] for one in rounds)
    both = Counter(rounds)
    assert both["a", "b"] > len(rounds) / 4
    assert both["b", "a"] > len(rounds) / 4
    assert found.times["a"] == pytest.approx([0.01] * len(found.times["a"]))
    assert found.times["b"] == pytest.approx([0.02] * len(found.times["a"]))
    assert found.settled
    assert found.warm_up == 2 * WINDOW
    assert len(rounds) == found.warm_up + len(found.times["a"])
    assert 0.03 * len(found.times["a"]) == pytest.approx(3, abs=0.04)


def test_a_slow_network_is_still_measured_a_few_times() -> None:
    clock, calls = FakeClock(), []
    found = interleaved({"slow": clock.taking(100.0, calls, "slow")}, seconds=1, clock=clock)
    assert len(found.times["slow"]) == LEAST
    assert found.warm_up == 1
    assert not found.settled


def test_what_a_call_leaves_running_is_waited_for_within_its_time() -> None:
    clock, calls = FakeClock(), []
    left = [0.0]

    def launch() -> None:
        left[0] = 0.5

    def finish() -> None:
        clock.now += left[0]
        left[0] = 0.0

    found = interleaved({"gpu": launch}, seconds=3, clock=clock, finish=finish)
    assert calls == []
    assert set(found.times["gpu"]) == {0.5}


# The machine


def test_threads_are_put_back_whatever_happens() -> None:
    before = torch.get_num_threads()
    with threads_set(before + 2) as inside:
        assert inside == torch.get_num_threads() == before + 2
    assert torch.get_num_threads() == before
    with pytest.raises(RuntimeError, match="broken"), threads_set(before + 1):
        raise RuntimeError("broken")
    assert torch.get_num_threads() == before


def test_the_machine_is_named() -> None:
    found = machine(torch.device("cpu"), 3)
    assert found["cpu"]
    assert found["threads"] == 3
    assert found["gpu"] is None
    assert found["torch"] == torch.__version__


def test_memory_on_a_cpu_is_what_is_alive_at_once() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(5):
                x = (x + 1).relu_()  # at most two of them at a time
            return x.flatten(1)

    x = torch.zeros(1, 1, 10, 10)
    assert peak_bytes(Chain(), x, None, torch.device("cpu")) == 400 + 2 * 400
    weights = nn.Sequential(nn.Linear(10, 5, bias=False))
    assert peak_bytes(weights, torch.zeros(1, 10), None, torch.device("cpu")) == 4 * (50 + 10 + 5)


# Runtimes


@pytest.mark.parametrize("name", ["torch", "onnxruntime", "openvino"])
def test_every_runtime_gives_torchs_answers(name: str, accelerated: tuple[nn.Module, leanconv.Accelerated]) -> None:
    if name != "torch":
        pytest.importorskip(name, reason=f"{name} is an extra")
        pytest.importorskip("onnxscript", reason="writing ONNX is an extra")
    pictures = smooth_images(3)
    model = accelerated[1].model
    RUNTIMES[name].refuse(model, CPU)
    answer = RUNTIMES[name].prepare(model, pictures, CPU)()
    found = answer if name == "torch" else torch.as_tensor(answer[0])
    with torch.no_grad():
        torch.testing.assert_close(found, model(pictures), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_answers_and_says_its_memory(accelerated: tuple[nn.Module, leanconv.Accelerated]) -> None:
    model, result = accelerated
    pictures = smooth_images(3)
    for name in ("torch", "torch-compile", "torch-cudagraph", "torch-kernels"):
        RUNTIMES[name].refuse(model, Conditions(device=torch.device("cuda")))
        found = RUNTIMES[name].prepare(model, pictures, Conditions(device=torch.device("cuda")))()
        with torch.no_grad():
            torch.testing.assert_close(found.cpu(), model(pictures), rtol=1e-2, atol=1e-2)
    networks = {"original": model, "accelerated": result.model}
    asked = ["torch", "torch-cudagraph"]
    timed = bench(networks, shape=(3, 16, 16), runtimes=asked, device="cuda", seconds=0.1, layers=True, progress=False)
    assert timed.machine["gpu"]
    weights = sum(4 * parameter.numel() for parameter in model.parameters())
    memory = [one.memory["original"] for one in timed.measurements]
    assert memory[0] is not None
    assert memory[0] > weights
    assert memory[1] is None


def test_channels_last_and_dtype_are_what_the_network_sees() -> None:
    seen: list[torch.Tensor] = []

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.extend([x, self.conv.weight])
            return self.conv(x)

    conditions = Conditions(device=torch.device("cpu"), dtype="bfloat16", channels_last=True)
    RUNTIMES["torch"].prepare(Looking(), torch.rand(2, 3, 8, 8), conditions)()
    assert all(x.dtype == torch.bfloat16 and x.is_contiguous(memory_format=torch.channels_last) for x in seen)


def test_fused_kernels_are_timed_as_a_runtime(accelerated: tuple[nn.Module, leanconv.Accelerated]) -> None:
    """On a CPU the layers they are put into answer as before."""
    model, result = accelerated
    pictures = smooth_images(3)
    for network in (model, result.model):
        found = RUNTIMES["torch-kernels"].prepare(network, pictures, Conditions(device=torch.device("cpu")))()
        with torch.no_grad():
            torch.testing.assert_close(found, network(pictures), rtol=1e-4, atol=1e-4)


SIGNALLED = """
import faulthandler, signal, subprocess, torch
from torch import nn
from leanconv.bench.runtimes import RUNTIMES, Conditions
faulthandler.enable()  # as pytest and many servers do: signals get a stack of their own
signal.signal(signal.SIGCHLD, lambda *_: None)  # as torch's data loaders do
x, conditions = torch.rand(1, 3, 16, 16), Conditions(device=torch.device("cpu"))
network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
calls = [RUNTIMES["openvino"].prepare(network, x, conditions) for _ in range(2)]
[call() for call in calls]
while calls:
    calls.pop(0)  # in the order they were made
for _ in range(20):
    subprocess.run(["true"], check=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a matter of Linux's signals")
def test_openvino_leaves_signals_alone() -> None:
    """A process that ends sends a signal, which is handled on the stack that was there before."""
    pytest.importorskip("openvino")
    done = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("runtime", "extra"), [("onnxruntime", "onnx"), ("openvino", "openvino")])
def test_what_is_not_installed_is_named_with_its_extra(
    runtime: str, extra: str, monkeypatch: pytest.MonkeyPatch, network: nn.Module
) -> None:
    monkeypatch.setitem(sys.modules, runtime, None)  # importing it then fails
    with pytest.raises(leanconv.LeanconvError, match=rf"pip install 'leanconv\[{extra}\]'"):
        bench({"a": network}, shape=(3, 16, 16), runtimes=[runtime], progress=False)


def test_compiling_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch, network: nn.Module) -> None:
    monkeypatch.setattr(runtimes.shutil, "which", lambda name: None)
    with pytest.raises(leanconv.LeanconvError, match=r"C\+\+ compiler"):
        RUNTIMES["torch-compile"].refuse(network, CPU)


def test_compiling_on_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch, network: nn.Module) -> None:
    monkeypatch.setattr(runtimes.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(leanconv.LeanconvError, match="needs Triton"):
        RUNTIMES["torch-compile"].refuse(network, Conditions(device=torch.device("cuda")))


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
    from leanconv.cli.given import load_network

    model = load_network("net.py:build", None, None, default_weights="none").model.eval()
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
    leanconv.accelerate(model, images, 2, solver="linear", samples=100, progress=False).save("lean")
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
