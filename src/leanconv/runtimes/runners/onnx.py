"""Runtimes that read ONNX files: onnxruntime and OpenVINO."""

from __future__ import annotations

import ctypes
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanconv.errors import LeanconvError, listing
from leanconv.runtimes.export.formats import EXPORTERS
from leanconv.runtimes.libraries import load
from leanconv.runtimes.runners.base import Conditions, Runner, refuse_detector

if TYPE_CHECKING:
    from torch import Tensor, nn


class OnnxRunner(Runner):
    """Runs the file ``leanconv export`` writes, for one input size: such runtimes plan their memory and choose their
    kernels for it."""

    timeable = True
    device = "cpu"

    def refuse(self, model: nn.Module, conditions: Conditions) -> None:
        for needs in (self, EXPORTERS["onnx"]):
            for library in needs.libraries:
                load(library, needs.extra)
        refuse_detector(self.name, model)

    def prepare(self, model: nn.Module, example: Any, conditions: Conditions) -> Callable[[], Any]:
        from leanconv.runtimes.export.program import export

        with tempfile.TemporaryDirectory() as folder:
            file = export(model, example, Path(folder) / "network.onnx", dynamic=False, check=False).path
            return self.open_onnx(str(file), example, conditions)

    @abstractmethod
    def open_onnx(self, file: str | bytes, example: Tensor, conditions: Conditions) -> Callable[[], Any]:
        """A call of an ONNX file, its path or its content, on ``example``."""


class OnnxRuntime(OnnxRunner):
    name = "onnxruntime"
    libraries = ("onnxruntime",)
    extra = "onnx"

    def refuse(self, model: nn.Module, conditions: Conditions) -> None:
        super().refuse(model, conditions)
        if conditions.dtype != "float32":
            raise LeanconvError(
                f"onnxruntime runs float32 here, not {conditions.dtype}; leave --dtype out or use another runtime."
            )
        offered = load(self.name, self.extra).get_available_providers()
        if _provider(conditions) not in offered:
            raise LeanconvError(
                f"the onnxruntime installed has no {_provider(conditions)} (it has {listing(offered)}); give "
                "--device cpu, or pip install onnxruntime-gpu."
            )

    def open_onnx(self, file: str | bytes, example: Tensor, conditions: Conditions) -> Callable[[], Any]:
        runtime = load(self.name, self.extra)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = conditions.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Threads that wait for work by spinning would take the cores from the other network.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = runtime.InferenceSession(file, options, providers=[_provider(conditions)])
        inputs = {session.get_inputs()[0].name: example.contiguous().numpy()}
        return lambda: session.run(None, inputs)

    def details(self) -> str:
        return listing(load(self.name, self.extra).get_available_providers())


def _provider(conditions: Conditions) -> str:
    return "CUDAExecutionProvider" if conditions.device.type == "cuda" else "CPUExecutionProvider"


class OpenVino(OnnxRunner):
    """OpenVINO in one stream, tuned for the time of one call."""

    name = "openvino"
    libraries = ("openvino",)
    extra = "openvino"

    def refuse(self, model: nn.Module, conditions: Conditions) -> None:
        super().refuse(model, conditions)
        if conditions.device.type != "cpu":
            raise LeanconvError(f"openvino runs on the CPU here, not on {conditions.device}; give --device cpu.")

    def open_onnx(self, file: str | bytes, example: Tensor, conditions: Conditions) -> Callable[[], Any]:
        settings = {
            "INFERENCE_NUM_THREADS": conditions.threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            # Without a hint it computes in bfloat16 where the CPU can.
            "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[conditions.dtype],
        }
        core = load(self.name, self.extra).Core()
        with same_signal_stack():
            compiled = core.compile_model(core.read_model(file), "CPU", settings)
        request = compiled.create_infer_request()
        inputs = [example.contiguous().numpy()]

        def call() -> list[Any]:
            answers = request.infer(inputs, share_inputs=True, share_outputs=True)
            return [answers[output] for output in compiled.outputs]

        return call

    def details(self) -> str:
        return listing(load(self.name, self.extra).Core().available_devices)


class _Stack(ctypes.Structure):
    """``stack_t`` of signal.h, as Linux has it."""

    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def same_signal_stack() -> Iterator[None]:
    """Restore the calling thread's signal stack.

    OpenVINO's compiled network sets a stack of its own and, when it is deleted, the stack that was there before. Of two
    networks deleted in the order they were made, the second thus sets the first's, whose memory is gone: the next
    signal, such as the end of a data loader's worker, kills the process.
    """
    if sys.platform != "linux":
        yield
        return
    sigaltstack = ctypes.CDLL(None).sigaltstack
    before = _Stack()
    known = sigaltstack(None, ctypes.byref(before)) == 0
    try:
        yield
    finally:
        if known:
            sigaltstack(ctypes.byref(before), None)
