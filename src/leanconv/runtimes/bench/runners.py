"""What can run a network: torch in four ways, onnxruntime and OpenVINO. One class a runtime, one method each."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from leanconv.errors import LeanconvError, listing
from leanconv.kernels.availability import missing
from leanconv.kernels.optimize import apply
from leanconv.network.torchvision_detectors import kind_of
from leanconv.network.user_model import copied, model_failed
from leanconv.runtimes.bench.signals import same_signal_stack
from leanconv.runtimes.export.onnx import needed, to_onnx

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What every runtime is asked for. ``channels_last`` is a matter of torch's; the others choose for themselves."""

    device: torch.device
    threads: int = 1
    dtype: str = "float32"
    channels_last: bool = False


class Runner(Protocol):
    """A runtime. ``refuse`` says in one sentence why it cannot run ``model`` here, before any time is spent;
    ``prepare`` turns ``model``, in eval mode, and an input into a call that answers it."""

    name: str

    def refuse(self, model: nn.Module, conditions: Conditions) -> None: ...

    def prepare(self, model: nn.Module, example: Any, conditions: Conditions) -> Callable[[], Any]: ...


def placed(model: nn.Module, conditions: Conditions) -> nn.Module:
    """A copy of ``model`` in eval mode, where and in the form it is to run."""
    network = copied(model).eval().to(conditions.device, DTYPES[conditions.dtype])
    # Five-dimensional filters have a channels-last form of their own, which this is not about.
    flat = all(tensor.dim() != 5 for tensor in network.parameters())
    return network.to(memory_format=torch.channels_last) if conditions.channels_last and flat else network


def handed(example: Any, conditions: Conditions) -> Any:
    """``example``, a tensor or a detector's list of them, where and in the form it is to be taken."""

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        moved = value.to(conditions.device, DTYPES[conditions.dtype])
        last = conditions.channels_last and moved.dim() == 4
        return moved.contiguous(memory_format=torch.channels_last) if last else moved

    return tree_map(one, example)


class Torch:
    """torch as it is, operation by operation."""

    name = "torch"

    def refuse(self, model: nn.Module, conditions: Conditions) -> None:
        pass

    def prepare(self, model: nn.Module, example: Any, conditions: Conditions) -> Callable[[], Any]:
        return _calling(placed(model, conditions), handed(example, conditions))


class TorchCompile:
    """torch.compile: on a GPU with every kernel tuned (max-autotune), on a CPU as it comes."""

    name = "torch-compile"

    def refuse(self, model: nn.Module, conditions: Conditions) -> None:
        if conditions.device.type == "cuda":
            if importlib.util.find_spec("triton") is None:
                raise LeanconvError("torch-compile on a GPU needs Triton, which is not installed; pip install triton.")
        elif not any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++", "cl") if name):
            raise LeanconvError("torch-compile on a CPU needs a C++ compiler; install g++ or clang++.")

    def prepare(self, model: nn.Module, example: Any, conditions: Conditions) -> Callable[[], Any]:
        mode = "max-autotune" if conditions.device.type == "cuda" else "default"
        network = torch.compile(placed(model, conditions), mode=mode, dynamic=False)
        call = _calling(network, handed(example, conditions))
        try:
            call()
        except LeanconvError as error:
            # Compiling fails in a dozen classes of its own; the network itself was seen to run before.
            raise LeanconvError(f"torch-compile could not compile the network: {error}") from error
        return call


class TorchCudaGraph:
    """The launches of one run recorded on the GPU and replayed at once."""

    name = "torch-cudagraph"

    def refuse(self, model: nn.Module, conditions: Conditions) -> None:
        if conditions.device.type != "cuda":
            raise LeanconvError(
                f"torch-cudagraph runs on a GPU only, and the device is {conditions.device}; give --device cuda where "
                "there is one."
            )
        _refuse_detector(self.name, model)

    def prepare(self, model: nn.Module, example: Any, conditions: Conditions) -> Callable[[], Any]:
        call = _calling(placed(model, conditions), handed(example, conditions))
        # Libraries set themselves up on their first runs, which must not be recorded.
        with torch.cuda.device(conditions.device):
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(3):
                    call()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                answer = call()

        def replay(kept: Any = call) -> Any:  # a graph reads weights where they lie, and does not keep them
            graph.replay()
            return answer

        return replay


class TorchKernels:
    """torch with leanconv's fused kernels where a layer is factorised, channels-last; the original as torch has it."""

    name = "torch-kernels"

    def refuse(self, model: nn.Module, conditions: Conditions) -> None:
        why = missing(conditions.device)
        if why is not None:
            raise LeanconvError(f"torch-kernels cannot run here: {why}")
        _refuse_detector(self.name, model)

    def prepare(self, model: nn.Module, example: Any, conditions: Conditions) -> Callable[[], Any]:
        last = replace(conditions, channels_last=True)
        network = placed(model, last).requires_grad_(False)
        apply(network, "auto")
        return _calling(network, handed(example, last))


class OnnxRuntime:
    """onnxruntime on the file ``leanconv export`` writes, at this very input size."""

    name = "onnxruntime"

    def refuse(self, model: nn.Module, conditions: Conditions) -> None:
        runtime, *_ = (needed(library) for library in ("onnxruntime", "onnx", "onnxscript"))
        _refuse_detector(self.name, model)
        if conditions.dtype != "float32":
            raise LeanconvError(
                f"onnxruntime runs float32 here, not {conditions.dtype}; leave --dtype out or use another runtime."
            )
        offered = runtime.get_available_providers()
        if _provider(conditions) not in offered:
            raise LeanconvError(
                f"the onnxruntime installed has no {_provider(conditions)} (it has {listing(offered)}); give "
                "--device cpu, or pip install onnxruntime-gpu."
            )

    def prepare(self, model: nn.Module, example: Any, conditions: Conditions) -> Callable[[], Any]:
        with tempfile.TemporaryDirectory() as scratch:
            return open_onnxruntime(str(_exported(model, example, Path(scratch))), example, conditions)


class OpenVino:
    """OpenVINO on the same file, in one stream, tuned for the time of one call."""

    name = "openvino"

    def refuse(self, model: nn.Module, conditions: Conditions) -> None:
        _openvino()
        for library in ("onnx", "onnxscript"):
            needed(library)
        _refuse_detector(self.name, model)
        if conditions.device.type != "cpu":
            raise LeanconvError(f"openvino runs on the CPU here, not on {conditions.device}; give --device cpu.")

    def prepare(self, model: nn.Module, example: Any, conditions: Conditions) -> Callable[[], Any]:
        with tempfile.TemporaryDirectory() as scratch:
            return open_openvino(str(_exported(model, example, Path(scratch))), example, conditions)


RUNTIMES: dict[str, Runner] = {
    runner.name: runner
    for runner in (Torch(), TorchCompile(), TorchCudaGraph(), TorchKernels(), OnnxRuntime(), OpenVino())
}


def open_onnxruntime(file: str | bytes, example: Tensor, conditions: Conditions) -> Callable[[], Any]:
    """A call of an ONNX ``file``, its path or its content, on ``example``."""
    runtime = needed("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = conditions.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Threads that wait for work by spinning would take the cores from the other network.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = runtime.InferenceSession(file, options, providers=[_provider(conditions)])
    given = {session.get_inputs()[0].name: example.contiguous().numpy()}
    return lambda: session.run(None, given)


def open_openvino(file: str | bytes, example: Tensor, conditions: Conditions) -> Callable[[], Any]:
    """The same in OpenVINO."""
    openvino = _openvino()
    settings = {
        "INFERENCE_NUM_THREADS": conditions.threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        # Left to itself it computes in bfloat16 where the CPU can.
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[conditions.dtype],
    }
    core = openvino.Core()
    with same_signal_stack():
        compiled = core.compile_model(core.read_model(file), "CPU", settings)
    request = compiled.create_infer_request()
    given = [example.contiguous().numpy()]

    def call() -> list[Any]:
        found = request.infer(given, share_inputs=True, share_outputs=True)
        return [found[output] for output in compiled.outputs]

    return call


def _calling(network: Any, given: Any) -> Callable[[], Any]:
    def call() -> Any:
        with torch.inference_mode():
            try:
                return network(given)
            except Exception as error:
                raise model_failed(error, given) from error

    return call


def _provider(conditions: Conditions) -> str:
    return "CUDAExecutionProvider" if conditions.device.type == "cuda" else "CPUExecutionProvider"


def _openvino() -> Any:
    try:
        import openvino
    except ImportError:
        raise LeanconvError("openvino is not installed; pip install 'leanconv[openvino]'.") from None
    return openvino


def _refuse_detector(runtime: str, model: nn.Module) -> None:
    if kind_of(model) is not None:
        raise LeanconvError(
            f"{runtime} does not run detectors here, whose shapes depend on what they find; use torch or torch-compile."
        )


def _exported(model: nn.Module, example: Tensor, folder: Path) -> Path:
    # Of this one size: both runtimes plan their memory and choose their kernels for it.
    return to_onnx(model, example, folder / "network.onnx", dynamic=False, check=False)
