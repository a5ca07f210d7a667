"""Whether the kernels can run here."""

from __future__ import annotations

import functools
import importlib.util

import torch

from leanconv.errors import LeanconvError

# wgmma, large shared memory and bfloat16 came step by step; the kernels ask for matrix units that know bfloat16.
LEAST_CAPABILITY = (8, 0)


def missing(device: torch.device) -> str | None:
    """What keeps the kernels from running on ``device``, and what to do; None if nothing does."""
    if device.type != "cuda":
        return f"leanconv's kernels run on an NVIDIA GPU, and the network is on {device}; move it there first."
    return _missing_on(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _missing_on(number: int) -> str | None:
    if torch.version.cuda is None:
        return "leanconv's kernels run on NVIDIA GPUs, and this torch is built for others; use the network as it is."
    capability = torch.cuda.get_device_capability(number)
    if capability < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(number)
        return (
            f"leanconv's kernels need a GPU of capability 8.0 (A100) or later, and {name} has "
            f"{'.'.join(map(str, capability))}; use the network as it is."
        )
    if importlib.util.find_spec("triton") is None:
        return "leanconv's kernels need Triton, which is not installed; pip install 'leanconv[kernels]'."
    return None


def available(device: torch.device) -> bool:
    """Whether the kernels run on ``device``."""
    return device.type == "cuda" and _usable(torch.cuda.current_device() if device.index is None else device.index)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _usable(number: int) -> bool:
    return _missing_on(number) is None


def check(device: torch.device) -> None:
    """Refuse a device the kernels do not run on."""
    problem = missing(device)
    if problem is not None:
        raise LeanconvError(problem)
