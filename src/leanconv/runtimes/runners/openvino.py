"""OpenVINO."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from leanconv.errors import LeanconvError, listing
from leanconv.runtimes.libraries import load
from leanconv.runtimes.runners.base import Conditions, OnnxRunner

if TYPE_CHECKING:
    from torch import Tensor, nn


class OpenVino(OnnxRunner):
    """OpenVINO on the same file as onnxruntime, in one stream, tuned for the time of one call."""

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
    """Put the calling thread's signal stack back.

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
