"""``torch.ops.leanconv.factored``: a factorised layer and what follows it as one operation.

On an NVIDIA GPU it runs the kernels; elsewhere, and where they do not apply, torch's own operations, to the same
numbers up to the order of roundings. It has no derivative: layers that are trained do not call it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from leanconv.kernels.availability import available
from leanconv.kernels.launch import activate
from leanconv.kernels.prepared import compute

NAME = "leanconv::factored"
SCHEMA = (
    "(Tensor x, Tensor[] weights, Tensor? bias, Tensor? addend, int[] geometry, str activation, bool pool) -> Tensor"
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def runs_here(x: Tensor) -> bool:
    """Whether the kernels are for this map: on a GPU that has them, of a dtype the matrix units take."""
    return x.is_cuda and x.dim() == 4 and x.dtype in DTYPES and available(x.device)


def eager(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    addend: Tensor | None,
    geometry: Sequence[int],
    activation: str,
    pool: bool,
) -> Tensor:
    """``leanconv::factored`` in torch's own operations.

    ``weights``: of convolutions in a row, d x c x kh x kw; ``bias`` is the last one's. ``geometry``: for each the
    stride, padding and dilation, two numbers each. ``addend`` is added before the activation; ``pool``: the largest of
    every 2 x 2 behind it.
    """
    for number, weight in enumerate(weights):
        own = bias if number == len(weights) - 1 else None
        x = F.conv2d(x, weight, own, *_three(geometry, number))
    if addend is not None:
        x = x + addend
    x = activate(x, activation)
    return F.max_pool2d(x, 2) if pool else x


@torch.library.custom_op(NAME, mutates_args=(), schema=SCHEMA)
def factored(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    addend: Tensor | None,
    geometry: Sequence[int],
    activation: str,
    pool: bool,
) -> Tensor:
    """See ``eager``. The answer is channels-last where the kernels run, else as ``x`` is."""
    if not runs_here(x):
        form = _form(x)
        return eager(x, weights, bias, addend, geometry, activation, pool).contiguous(memory_format=form)
    return compute(x, weights, bias, addend, geometry, activation, pool)


@factored.register_fake
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    addend: Tensor | None,
    geometry: Sequence[int],
    activation: str,
    pool: bool,
) -> Tensor:
    answer = eager(x, weights, bias, addend, geometry, activation, pool)
    return torch.empty_like(answer, memory_format=torch.channels_last if runs_here(x) else _form(x))


def _three(geometry: Sequence[int], number: int) -> tuple[list[int], list[int], list[int]]:
    """Stride, padding and dilation of a convolution."""
    own = list(geometry[6 * number : 6 * number + 6])
    return own[:2], own[2:4], own[4:]


def _form(x: Tensor) -> torch.memory_format:
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format
