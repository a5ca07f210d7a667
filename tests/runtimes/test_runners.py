"""Runtimes: each gives torch's answers, or a sentence where it cannot run."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import leanconv
from leanconv.runtimes.bench.comparison import bench
from leanconv.runtimes.export.formats import EXPORTERS
from leanconv.runtimes.runners import RUNTIMES, Conditions
from tests.support.pictures import smooth_images

CPU = Conditions(device=torch.device("cpu"))


def test_importing_the_registries_imports_no_library() -> None:
    """The help of the command is made from them."""
    script = "import sys, leanconv.runtimes.runners, leanconv.runtimes.export.formats; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "onnx", "onnxruntime", "openvino"} & set(done.stdout.split())


def test_importing_leanconv_and_its_target_imports_no_runtime() -> None:
    script = "import sys, leanconv; leanconv.Target; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "leanconv.runtimes.target" in done.stdout.split()
    assert "leanconv.runtimes.runners" not in done.stdout.split()


def test_every_runtime_says_which_extra_installs_its_libraries() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for known in (*RUNTIMES.values(), *EXPORTERS.values()):
        for library in known.libraries:
            assert any(one.startswith(library) for one in extras[known.extra])


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
from leanconv.runtimes.runners import RUNTIMES, Conditions
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


@pytest.mark.nightly
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
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(leanconv.LeanconvError, match=r"C\+\+ compiler"):
        RUNTIMES["torch-compile"].refuse(network, CPU)


def test_compiling_on_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch, network: nn.Module) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(leanconv.LeanconvError, match="needs Triton"):
        RUNTIMES["torch-compile"].refuse(network, Conditions(device=torch.device("cuda")))
