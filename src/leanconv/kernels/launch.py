"""A stage on the GPU: from tensors to launches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leanconv.kernels.eager import run_eagerly
from leanconv.kernels.fused_stage import PACKED, Plan, Stage, powers, precision, steps, up
from leanconv.kernels.pack import packed, padded_bias

# Called with x, addend and out.
Launch = Callable[[Tensor, Tensor | None, Tensor], None]
# Everything else that kernels take, by the names of their parameters.
Values = dict[str, Any]


def run(
    stage: Stage,
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    second: Tensor | None,
    bias: Tensor | None,
    addend: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """The stage by ``plan``. ``x``, ``addend`` and the answer (``out``, if it is given) are channels-last.

    ``weight``: rank x channels x kh x kw; ``second``: filters x rank x 1 x 1.
    """
    if plan.form == "eager":
        return run_eagerly(stage, x, weight, second, bias, addend)
    if out is None:
        out = empty(stage, x)
    if out.numel():
        with torch.cuda.device_of(x):
            prepare(stage, plan, weight, second, bias)(x, addend, out)
    return out


def empty(stage: Stage, x: Tensor) -> Tensor:
    """Memory for the answer to ``x``."""
    return torch.empty(stage.out_shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def prepare(stage: Stage, plan: Plan, weight: Tensor, second: Tensor | None, bias: Tensor | None) -> Launch:
    """The launches of a stage by ``plan``, with all they take but the maps; to be called on the weights' device."""
    return _FORMS[plan.form](stage, plan, _values(stage, plan, weight, second, bias))


def _values(stage: Stage, plan: Plan, weight: Tensor, second: Tensor | None, bias: Tensor | None) -> Values:
    first = packed(weight, flat=stage.flat, columns=stage.columns)
    geometry = (*stage.kernel, *stage.stride, *stage.padding, *stage.dilation)
    values = {
        **dict(zip(("height", "width", "out_height", "out_width"), (*stage.size, *stage.out_size), strict=True)),
        **dict(zip(("KH", "KW", "SH", "SW", "PH", "PW", "DH", "DW"), geometry, strict=True)),
        **dict(zip(("w", "CP", "SK", "SN"), (first.values, first.rows, *first.strides), strict=True)),
        **_columns(stage.columns),
        **_counting(steps(stage, plan.block_k)),
        "bias": None if bias is None else padded_bias(bias, stage),
        "positions": stage.positions,
        "C": stage.channels,
        "D": stage.outputs,
        "FLAT": stage.flat,
        "BLOCKS": 1,
        "SUMS": 0,
        "SPLIT": 0,
        "ACTIVATION": stage.activation,
        "HAS_BIAS": bias is not None,
        "HAS_ADDEND": stage.addend,
        "POOL": int(stage.pool),
        # Triton's interpreter, on a CPU, multiplies as it stands.
        "PRECISION": precision(weight.dtype) if weight.is_cuda else "ieee",
        "BLOCK_M": plan.block_m,
        "BLOCK_K": plan.block_k,
        "BLOCK_N": plan.block_n,
        "num_warps": plan.warps,
        "num_stages": plan.depth,
    }
    if second is not None:
        # d x d' x 1 x 1 becomes d' x d, its rows padded like the columns of the first.
        matrix = packed(second, flat=False, columns=up(stage.outputs, PACKED))
        values |= dict(zip(("w2", "SK2", "SN2"), (matrix.values, *matrix.strides), strict=True))
    return values


def _columns(width: int) -> Values:
    sizes = powers(width)
    return {f"N{i}": sizes[i] if i < len(sizes) else 0 for i in range(4)}


def _counting(count: int, *, alone: bool = False) -> Values:
    """How often a loop over products runs, and whether the compiler may know; ``alone``: a step is one product, and no
    other follows the loop."""
    return {"steps": count, "KNOWN": count if count >= 16 or (alone and count == 1) else 0}


def _tiles(stage: Stage, plan: Plan) -> int:
    return -(-stage.positions // plan.block_m)


def _launch(kernel: Any, grid: tuple[int, ...], values: Values) -> Launch:
    """One launch of ``kernel`` with those of ``values`` that it has parameters for."""
    names = [*inspect.signature(kernel.fn).parameters, "num_warps", "num_stages"]
    own = {name: values[name] for name in names if name in values}
    return lambda x, addend, out: kernel[grid](x=x, addend=addend, out=out, **own)


def _conv(stage: Stage, plan: Plan, values: Values) -> Launch:
    from leanconv.kernels.fused import conv_kernel

    width = stage.columns if stage.columns <= 256 else PACKED
    blocks = stage.columns // width
    alone = stage.columns >= 32 and len(powers(stage.columns)) == 1
    values |= {**_columns(width), **_counting(steps(stage, plan.block_k), alone=alone), "BLOCKS": blocks}
    return _launch(conv_kernel, (_tiles(stage, plan) * blocks, 1), values)


def _split(stage: Stage, plan: Plan, values: Values) -> Launch:
    from leanconv.kernels.fused import conv_kernel, expand_kernel

    shares = -(-steps(stage, plan.block_k) // plan.share)
    values |= {"SUMS": stage.columns, "SPLIT": plan.share, "shares": shares}
    add_up = _launch(conv_kernel, (_tiles(stage, plan), shares), values)
    expand = _launch(expand_kernel, (_tiles(stage, plan), -(-stage.outputs // plan.block_n)), values)

    def launch(x: Tensor, addend: Tensor | None, out: Tensor) -> None:
        sums = torch.empty((shares, stage.positions, stage.columns), dtype=torch.float32, device=x.device)
        add_up(x, addend, sums)
        expand(sums, addend, out)

    return launch


def _pair(stage: Stage, plan: Plan, values: Values) -> Launch:
    from leanconv.kernels.fused import pair_kernel

    return _launch(pair_kernel, (_tiles(stage, plan),), values)


def _shifted(stage: Stage, plan: Plan, values: Values) -> Launch:
    from leanconv.kernels.fused import shifted_kernel

    high, wide = stage.out_size
    reach = stage.dilation[1]
    tall, halo = (2, up(reach, 2)) if stage.pool else (1, reach)
    lines = stage.images * high // tall
    owned = plan.block_m // tall - 2 * halo
    counting = _counting(steps(stage, plan.block_k) // 3)  # all three taps of a line in one step
    values |= {**counting, "lines": lines, "N": stage.columns, "HALO": halo, "POOL": 2 if stage.pool else 0}
    return _launch(shifted_kernel, (-(-lines * wide // owned),), values)


_FORMS: dict[str, Callable[[Stage, Plan, Values], Launch]] = {
    "conv": _conv,
    "pair": _pair,
    "shifted": _shifted,
    "split": _split,
}
