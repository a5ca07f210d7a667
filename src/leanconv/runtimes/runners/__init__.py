"""Runtimes: what can run a network. A new one is a class here and an entry in ``RUNTIMES``."""

from __future__ import annotations

from leanconv.runtimes.runners.base import DTYPES, Conditions, Runner
from leanconv.runtimes.runners.onnx import OnnxRuntime, OpenVino
from leanconv.runtimes.runners.torch import Torch, TorchCompile, TorchCudaGraph, TorchKernels

__all__ = ["DTYPES", "RUNTIMES", "Conditions", "Runner", "runtime_names"]

RUNTIMES: dict[str, Runner] = {
    runner.name: runner
    for runner in (Torch(), TorchCompile(), TorchCudaGraph(), TorchKernels(), OnnxRuntime(), OpenVino())
}


def runtime_names(*, timeable: bool = False) -> str:
    """Names for a help text, the default first; with ``timeable`` those that ``ranks="latency"`` takes."""
    first, *middle, last = [name for name, runner in RUNTIMES.items() if runner.timeable or not timeable]
    return f"{', '.join([f'{first} (default)', *middle])} or {last}"
