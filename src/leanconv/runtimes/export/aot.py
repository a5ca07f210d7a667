"""An AOTInductor package: the network compiled ahead of time for this kind of machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from leanconv.errors import LeanconvError
from leanconv.runtimes.export.program import prepared, quiet, traced
from leanconv.runtimes.export.trial import failing, tensors


def prepare(model: nn.Module, example: Tensor, device: torch.device | None, check: bool) -> tuple[nn.Module, Tensor]:
    from torch._inductor import cpp_builder

    try:
        with quiet():
            cpp_builder.get_cpp_compiler()
    except Exception:
        raise LeanconvError(
            "an AOTInductor package needs a C++ compiler, and there is none here; install g++ or clang++ (or set CXX), "
            "or use the format pt2."
        ) from None
    return prepared(model, example.contiguous(), device=device)


def write(
    network: nn.Module, example: Tensor, free: dict[int, str], file: Path, inputs: list[Tensor]
) -> Callable[[Tensor], list[Tensor]]:
    program = traced(network, example, free)
    with failing("AOTInductor does not compile it", writes=True), quiet():
        torch._inductor.aoti_compile_and_package(program, package_path=str(file))
        compiled = torch._inductor.aoti_load_package(str(file))
    return lambda x: tensors(compiled(x))
