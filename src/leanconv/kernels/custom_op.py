"""``torch.ops.leanconv.factored``: a factorised layer and what follows it as one operation.

On an NVIDIA GPU it runs the kernels; elsewhere, and where they do not apply, torch's own operations, to the same
numbers up to the order of roundings. It has no derivative: layers that are trained do not call it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leanconv.kernels.availability import available
from leanconv.kernels.eager import eager
from leanconv.kernels.prepared import compute

NAME = "leanconv::factored"
SCHEMA = (
    "(Tensor x, Tensor[] weights, Tensor? bias, Tensor? addend, int[] geometry, str activation, bool pool) -> Tensor"
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def runs_here(x: Tensor) -> bool:
    """Whether the kernels are for this map: on a GPU that has them, of a dtype the matrix units take."""
    return x.is_cuda and x.dim() == 4 and x.dtype in DTYPES and available(x.device)


@torch.library.custom_op(NAME, mutates_args=(), schema=SCHEMA)
def factored(x: Tensor, *layer: Any) -> Tensor:
    """``eager``, by the kernels where they run. The answer is channels-last there, else as ``x`` is."""
    return compute(x, *layer) if runs_here(x) else eager(x, *layer).contiguous(memory_format=_format(x))


@factored.register_fake
def _(x: Tensor, *layer: Any) -> Tensor:
    return torch.empty_like(eager(x, *layer), memory_format=torch.channels_last if runs_here(x) else _format(x))


def _format(x: Tensor) -> torch.memory_format:
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format
