"""ONNX: written with torch's exporter, checked in onnxruntime."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.errors import LeanconvError, warn, whole
from leanconv.runtimes.export.file_name import new_file
from leanconv.runtimes.export.program import Written, freest, prepared, quiet, shape_of, traced
from leanconv.runtimes.export.trial import Failed, compare, inputs, said, tensors

# A protobuf message cannot be larger than 2 GB; what is larger keeps its weights in a second file beside it.
ONE_FILE = (1 << 31) - (1 << 26)


def to_onnx(
    model: nn.Module, example: Tensor, path: str | Path, *, opset: int = 18, dynamic: bool = True, check: bool = True
) -> Path:
    """Write ``model`` to a new file ``path`` (.onnx) and compare it with torch in onnxruntime.

    ``example``: a batch of images of the usual size. ``dynamic``: batch and, where the network allows, height and width
    are free; else they are those of ``example``. Without ``check`` only the batch is: that a size is free shows in the
    check. The input is called ``images``, a single output ``output``. The file computes in float32, whatever the
    network does: not every runtime has half-precision convolutions on every machine.
    """
    return write_onnx(model, example, Path(path), opset=opset, dynamic=dynamic, check=check).path


def write_onnx(
    model: nn.Module, example: Tensor, path: Path, *, opset: int = 18, dynamic: bool = True, check: bool = True
) -> Written:
    """``to_onnx``, with what is known about the file."""
    onnx, _ = needed("onnx"), needed("onnxscript")
    runtime = needed("onnxruntime") if check else None
    whole("opset", opset, 17)
    with new_file(path, "onnx") as part:
        network, example = prepared(model, example, device=torch.device("cpu"), dtype=torch.float32)
        network.to(memory_format=torch.contiguous_format)  # else the file turns every filter round as it runs
        _say_dtype(model)

        def attempt(free: dict[int, str]) -> Written:
            _write(network, example, free, part, opset)
            try:
                onnx.checker.check_model(str(part))
            except Exception as error:
                raise Failed(f"onnx.checker refuses the file ({said(error)})") from error
            got = _opset(onnx, part)
            if got != opset:  # the exporter writes another one where it cannot translate
                raise LeanconvError(f"torch's exporter gives this network opset {got}, not {opset}; ask for {got}.")
            tried = inputs(network, example, free) if check else []
            return Written(
                path=path,
                format="onnx",
                input=shape_of(example, free),
                dtype="float32",
                checked=tuple(tuple(x.shape) for x in tried),
                difference=compare(network, _session(runtime, part), tried) if check else None,
                opset=got,
            )

        return freest(example, "the ONNX file", attempt, batch=dynamic, sizes=check)


def needed(name: str) -> Any:
    """A module of the extra ``onnx``."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise LeanconvError(f"{name} is not installed; pip install 'leanconv[onnx]'.") from None


def _say_dtype(model: nn.Module) -> None:
    found = {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32}
    for dtype in found:
        warn(f"the network is in {str(dtype).removeprefix('torch.')}, the ONNX file computes in float32.")


def _write(network: nn.Module, example: Tensor, free: dict[int, str], path: Path, opset: int) -> None:
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
            made.save(str(path), external_data=size > ONE_FILE)
    except OSError:
        raise
    except Exception as error:
        raise Failed(f"torch.onnx does not take it with these axes ({said(error.__cause__ or error)})") from error


def _session(runtime: Any, path: Path) -> Any:
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # its errors reach us as exceptions
    try:
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise Failed(f"onnxruntime does not take the file ({said(error)})") from error
    (given,) = session.get_inputs()

    def answers(x: Tensor) -> list[Tensor]:
        return [torch.as_tensor(found) for found in session.run(None, {given.name: x.contiguous().numpy()})]

    return answers


def _opset(onnx: Any, path: Path) -> int:
    header = onnx.load(str(path), load_external_data=False)
    return int(next(entry.version for entry in header.opset_import if entry.domain in ("", "ai.onnx")))
