"""onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from leanconv.errors import LeanconvError, listing
from leanconv.runtimes.libraries import load
from leanconv.runtimes.runners.base import Conditions, OnnxRunner

if TYPE_CHECKING:
    from torch import Tensor, nn


class OnnxRuntime(OnnxRunner):
    """onnxruntime on the file ``leanconv export`` writes, at this very input size."""

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
