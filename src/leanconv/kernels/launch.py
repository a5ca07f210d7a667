"""A stage on the GPU: from tensors to launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from leanconv.kernels.fused_stage import PACKED, Plan, Stage, powers, precision, steps, up
from leanconv.kernels.pack import packed, padded_bias

_EAGER: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "gelu": F.gelu,
    "hardswish": F.hardswish,
}


def activate(x: Tensor, activation: str) -> Tensor:
    return _EAGER[activation](x)


def run_eagerly(
    stage: Stage, x: Tensor, weight: Tensor, second: Tensor | None, bias: Tensor | None, addend: Tensor | None
) -> Tensor:
    """The stage in torch's own operations."""
    own = bias if second is None else None
    y = F.conv2d(x, weight, own, stage.stride, stage.padding, stage.dilation)
    if second is not None:
        y = F.conv2d(y, second, bias)
    if addend is not None:
        y = y + addend
    y = activate(y, stage.activation)
    return F.max_pool2d(y, 2) if stage.pool else y


# x, addend, out: what is left to be given to a stage that was prepared.
Launch = Callable[[Tensor, Tensor | None, Tensor], None]


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
    """The stage by ``plan``. ``x`` and ``addend`` are channels-last, and so is what is returned (in ``out``, if given).

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
    """Where the answer to ``x`` goes."""
    return torch.empty(stage.out_shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def prepare(stage: Stage, plan: Plan, weight: Tensor, second: Tensor | None, bias: Tensor | None) -> Launch:
    """The launches of a stage by ``plan``, with all they take but the maps; to be called on the weights' device."""
    return _FORMS[plan.form](_Arguments(stage, plan, weight, second, bias))


class _Arguments:
    """What the kernels take, by the names they take it by."""

    def __init__(self, stage: Stage, plan: Plan, weight: Tensor, second: Tensor | None, bias: Tensor | None) -> None:
        self.stage, self.plan = stage, plan
        first = packed(weight, flat=stage.flat, columns=stage.columns)
        high, wide = stage.out_size
        self.map = {"height": stage.size[0], "width": stage.size[1], "out_height": high, "out_width": wide}
        self.bias = {"bias": None if bias is None else padded_bias(bias, stage)}
        self.first = {
            "w": first.values,
            "C": stage.channels,
            "CP": first.rows,
            "SK": first.strides[0],
            "SN": first.strides[1],
        }
        geometry = (*stage.kernel, *stage.stride, *stage.padding, *stage.dilation)
        self.taps = dict(zip(("KH", "KW", "SH", "SW", "PH", "PW", "DH", "DW"), geometry, strict=True))
        self.after: dict[str, Any] = {
            "D": stage.outputs,
            "ACTIVATION": stage.activation,
            "HAS_BIAS": bias is not None,
            "HAS_ADDEND": stage.addend,
            "POOL": int(stage.pool),
        }
        self.second: dict[str, Any] = {}
        if second is not None:
            # d x d' x 1 x 1 becomes d' x d, its rows padded like the columns of the first.
            matrix = packed(second, flat=False, columns=up(stage.outputs, PACKED))
            self.second = {"w2": matrix.values, "SK2": matrix.strides[0], "SN2": matrix.strides[1]}
        # Triton's interpreter, on a CPU, multiplies as it stands.
        self.common = {"PRECISION": precision(weight.dtype) if weight.is_cuda else "ieee", "BLOCK_M": plan.block_m}
        self.launching = {"num_warps": plan.warps, "num_stages": plan.depth}

    @property
    def tiles(self) -> int:
        return -(-self.stage.positions // self.plan.block_m)


def _counting(number: int, *, alone: bool = False) -> dict[str, int]:
    """How often a loop over products runs, and whether the compiler may know; ``alone``: a step is one product, and no
    other follows the loop."""
    return {"steps": number, "KNOWN": number if number >= 16 or (alone and number == 1) else 0}


def _columns(width: int) -> dict[str, int]:
    sizes = powers(width)
    return {f"N{i}": sizes[i] if i < len(sizes) else 0 for i in range(4)}


def _one(kernel: Any, grid: tuple[int, ...], **known: Any) -> Launch:
    """One launch, of which ``known`` does not change."""
    return lambda x, addend, out: kernel[grid](x=x, addend=addend, out=out, **known)


def _conv(a: _Arguments) -> Launch:
    from leanconv.kernels.fused import conv_kernel

    columns = a.stage.columns
    width = columns if columns <= 256 else PACKED
    blocks = columns // width
    return _one(
        conv_kernel,
        (a.tiles * blocks, 1),
        **a.bias,
        positions=a.stage.positions,
        **a.map,
        **a.first,
        **a.taps,
        **_columns(width),
        **a.after,
        **a.common,
        BLOCKS=blocks,
        SUMS=0,
        SPLIT=0,
        **_counting(steps(a.stage, a.plan.block_k), alone=columns >= 32 and len(powers(columns)) == 1),
        FLAT=a.stage.flat,
        BLOCK_K=a.plan.block_k,
        **a.launching,
    )


def _split(a: _Arguments) -> Launch:
    from leanconv.kernels.fused import conv_kernel, expand_kernel

    stage, plan = a.stage, a.plan
    shares = -(-steps(stage, plan.block_k) // plan.share)
    summing = _one(
        conv_kernel,
        (a.tiles, shares),
        **a.bias,
        positions=stage.positions,
        **a.map,
        **a.first,
        **a.taps,
        **_columns(stage.columns),
        **a.after,
        **a.common,
        BLOCKS=1,
        SUMS=stage.columns,
        SPLIT=plan.share,
        **_counting(steps(a.stage, a.plan.block_k)),
        FLAT=a.stage.flat,
        BLOCK_K=plan.block_k,
        **a.launching,
    )
    expanding = {
        **a.bias,
        "positions": stage.positions,
        "shares": shares,
        **_columns(stage.columns),
        **a.second,
        **a.after,
        **a.common,
        "SUMS": stage.columns,
        "BLOCK_N": plan.block_n,
        **a.launching,
    }
    grid = (a.tiles, -(-stage.outputs // plan.block_n))

    def launch(x: Tensor, addend: Tensor | None, out: Tensor) -> None:
        sums = torch.empty((shares, stage.positions, stage.columns), dtype=torch.float32, device=x.device)
        summing(x, addend, sums)
        expand_kernel[grid](sums=sums, addend=addend, out=out, **expanding)

    return launch


def _pair(a: _Arguments) -> Launch:
    from leanconv.kernels.fused import pair_kernel

    return _one(
        pair_kernel,
        (a.tiles,),
        **a.bias,
        positions=a.stage.positions,
        **a.map,
        **a.first,
        **a.second,
        **a.taps,
        **_columns(a.stage.columns),
        **a.after,
        **a.common,
        **_counting(steps(a.stage, a.plan.block_k)),
        FLAT=a.stage.flat,
        BLOCK_K=a.plan.block_k,
        BLOCK_N=a.plan.block_n,
        **a.launching,
    )


def _shifted(a: _Arguments) -> Launch:
    from leanconv.kernels.shifted import shifted_kernel

    stage, plan = a.stage, a.plan
    high, wide = stage.out_size
    reach = stage.dilation[1]
    tall, halo = (2, up(reach, 2)) if stage.pool else (1, reach)
    lines = stage.images * high // tall
    owned = plan.block_m // tall - 2 * halo
    taps = {name: a.taps[name] for name in ("SH", "PH", "DH", "DW")}
    return _one(
        shifted_kernel,
        (-(-lines * wide // owned),),
        **a.bias,
        lines=lines,
        height=stage.size[0],
        width=wide,
        out_height=high,
        **_counting(steps(stage, plan.block_k) // 3),  # all three taps of a line in one step
        **a.first,
        **a.second,
        **taps,
        N=stage.columns,
        **a.after | {"POOL": 2 if stage.pool else 0},
        **a.common,
        HALO=halo,
        BLOCK_K=plan.block_k,
        BLOCK_N=plan.block_n,
        **a.launching,
    )


_FORMS: dict[str, Callable[[_Arguments], Launch]] = {"conv": _conv, "pair": _pair, "shifted": _shifted, "split": _split}
