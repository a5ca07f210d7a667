"""A row of plain layers written to ONNX directly: torch's exporter takes a second a network, and hundreds are timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from leanconv.runtimes.libraries import load
from leanconv.runtimes.runners import RUNTIMES, Conditions
from leanconv.runtimes.runners.base import OnnxRunner

OPSET, IR = 18, 9
ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "Relu", nn.Sigmoid: "Sigmoid", nn.Tanh: "Tanh"}


def prepared(network: nn.Sequential, example: Tensor, runtime: str, conditions: Conditions) -> Callable[[], Any]:
    """A call of ``network``, a row of layers, in ``runtime``."""
    runner = RUNTIMES[runtime]
    if isinstance(runner, OnnxRunner) and (model := written(network, example)) is not None:
        return runner.open_onnx(model, example, conditions)
    return runner.prepare(network, example, conditions)


def written(network: nn.Sequential, example: Tensor) -> bytes | None:
    """``network`` as the bytes of an ONNX file; None for what is not plain enough."""
    onnx = load("onnx", "onnx")
    helper, from_array = onnx.helper, onnx.numpy_helper.from_array
    nodes, weights, here = [], [], "images"
    for number, module in enumerate(network):
        given, here = here, f"output{number}"
        if type(module) in ACTIVATIONS:
            nodes.append(helper.make_node(ACTIVATIONS[type(module)], [given], [here]))
            continue
        settings = _settings(module, example)
        if settings is None:
            return None
        operation, attributes = settings
        names = [f"{name}{number}" for name, _ in module.named_parameters()]
        nodes.append(helper.make_node(operation, [given, *names], [here], **attributes))
        weights += [
            from_array(value.detach().cpu().float().contiguous().numpy(), name)
            for name, value in zip(names, module.parameters(), strict=True)
        ]
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "layers",
        [helper.make_tensor_value_info("images", kind, list(example.shape))],
        [helper.make_tensor_value_info(here, kind, None)],
        weights,
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
    return bytes(made.SerializeToString())


def _settings(module: nn.Module, example: Tensor) -> tuple[str, dict[str, Any]] | None:
    """ONNX's operation and attributes for a layer."""
    if type(module) is nn.Linear and example.dim() == 2:
        return "Gemm", {"transB": 1}
    if type(module) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d) or module.padding_mode != "zeros":
        return None
    assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    attributes: dict[str, Any] = {
        "kernel_shape": module.kernel_size,
        "strides": module.stride,
        "dilations": module.dilation,
        "group": module.groups,
    }
    if isinstance(module.padding, str):
        attributes["auto_pad"] = {"same": "SAME_UPPER", "valid": "VALID"}[module.padding]
    else:
        attributes["pads"] = [*module.padding, *module.padding]
    return "Conv", attributes
