"""Whether the kernels can run here."""

from __future__ import annotations

import functools
import importlib.util

import torch

# The first whose matrix units multiply bfloat16.
LEAST_CAPABILITY = (8, 0)


def missing(device: torch.device) -> str | None:
    """What keeps the kernels from running on ``device``, and what to do; None if nothing does."""
    if device.type != "cuda":
        return f"leanconv's kernels run on an NVIDIA GPU, and the network is on {device}; move it there first."
    return _missing_on(_index(device))


@functools.cache
def _missing_on(index: int) -> str | None:
    if torch.version.cuda is None:
        return "leanconv's kernels run on NVIDIA GPUs, and this torch is built for others; use the network as it is."
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(index)
        return (
            f"leanconv's kernels need a GPU of capability 8.0 (A100) or later, and {name} has "
            f"{'.'.join(map(str, capability))}; use the network as it is."
        )
    if importlib.util.find_spec("triton") is None:
        return "leanconv's kernels need Triton, which is not installed; pip install 'leanconv[kernels]'."
    return None


def available(device: torch.device) -> bool:
    """Whether the kernels run on ``device``."""
    return device.type == "cuda" and _usable(_index(device))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _usable(index: int) -> bool:
    return _missing_on(index) is None
