"""A row of plain layers written to ONNX directly: torch's exporter takes a second a network, and hundreds are timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from leanconv.network import activations
from leanconv.network.layers.kinds import REPLACEABLE, kind_of
from leanconv.runtimes.libraries import load
from leanconv.runtimes.runners import RUNTIMES, Conditions
from leanconv.runtimes.runners.onnx import OnnxRunner

OPSET, IR = 18, 9


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
        if type(module) in activations.ONNX:
            nodes.append(helper.make_node(activations.ONNX[type(module)], [given], [here]))
            continue
        settings = kind_of(module).onnx(module, example) if type(module) in REPLACEABLE else None
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
