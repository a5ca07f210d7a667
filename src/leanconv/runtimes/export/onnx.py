"""ONNX: written with torch's exporter, checked in onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.errors import LeanconvError, warn
from leanconv.runtimes.export.program import prepared, quiet, traced
from leanconv.runtimes.export.trial import Failed, error_text, failing, tensors
from leanconv.runtimes.libraries import load

# A protobuf message is at most 2 GB: a larger network has its weights in a second file beside it.
ONE_FILE = (1 << 31) - (1 << 26)


def prepare(model: nn.Module, example: Tensor, device: torch.device | None, check: bool) -> tuple[nn.Module, Tensor]:
    if check:
        load("onnxruntime", "onnx")
    network, example = prepared(model, example, device=torch.device("cpu"), dtype=torch.float32)
    for dtype in {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32}:
        warn(f"the network is in {str(dtype).removeprefix('torch.')}, the ONNX file computes in float32.")
    # Else the file transposes every filter as it runs.
    return network.to(memory_format=torch.contiguous_format), example


def write(
    network: nn.Module, example: Tensor, free: dict[int, str], file: Path, inputs: list[Tensor], *, opset: int
) -> Callable[[Tensor], list[Tensor]]:
    onnx, runtime = load("onnx", "onnx"), load("onnxruntime", "onnx") if inputs else None
    _write(network, example, free, file, opset)
    with failing("onnx.checker refuses the file"):
        onnx.checker.check_model(str(file))
    header = onnx.load(str(file), load_external_data=False)
    actual = next(entry.version for entry in header.opset_import if entry.domain in ("", "ai.onnx"))
    if actual != opset:  # the exporter writes another one where it cannot translate
        raise LeanconvError(f"torch's exporter gives this network opset {actual}, not {opset}; ask for {actual}.")
    return _session(runtime, file) if inputs else lambda x: []


def _write(network: nn.Module, example: Tensor, free: dict[int, str], file: Path, opset: int) -> None:
    program = traced(network, example, free)
    with torch.no_grad():
        outputs = len(tensors(network(example[:1])))
    size = sum(tensor.nbytes for tensor in (*program.state_dict.values(), *program.constants.values()))
    names: dict[str, Any] = {"input_names": ["images"], "dynamic_shapes": (free,) if free else None}
    if outputs == 1:
        names["output_names"] = ["output"]
    try:
        with quiet():
            made = torch.onnx.export(program, (), dynamo=True, opset_version=opset, verbose=False, **names)
            assert made is not None
            made.save(str(file), external_data=size > ONE_FILE)
    except OSError:
        raise
    except Exception as error:
        raise Failed(f"torch.onnx does not take it with these axes ({error_text(error.__cause__ or error)})") from error


def _session(runtime: Any, file: Path) -> Callable[[Tensor], list[Tensor]]:
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # its errors reach us as exceptions
    with failing("onnxruntime does not take the file"):
        session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    (images,) = session.get_inputs()

    def answers(x: Tensor) -> list[Tensor]:
        return [torch.as_tensor(answer) for answer in session.run(None, {images.name: x.contiguous().numpy()})]

    return answers
