"""Random layers through the Triton kernels, against float64, in memory with guards around it.

Run by test_kernels.py in a process of its own, on a CPU under Triton's interpreter, which must be chosen before Triton
is imported; and by the tests of a GPU, where it is compiled.
"""

from __future__ import annotations

import gc
import json
import math
import random
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from leanconv.kernels import custom_op as op
from leanconv.kernels import prepared as ready
from leanconv.kernels.eager import eager, run_eagerly
from leanconv.kernels.fused_stage import ACTIVATIONS, Plan, Stage
from leanconv.kernels.launch import run

GUARD = 64  # numbers before and behind the output that nobody may touch


def stages(form: str, dtype: torch.dtype, count: int, seed: int) -> Iterator[Stage]:
    draw = random.Random(f"{form} {dtype} {seed}")
    while count:
        pool = draw.random() < 0.4
        kernel, stride, padding, dilation = (
            (draw.choice(choices), draw.choice(choices)) for choices in ((1, 2, 3), (1, 2), (0, 1, 2), (1, 2))
        )
        if form == "shifted":
            kernel, stride, padding = (kernel[0], 3), (stride[0], 1), (padding[0], dilation[1])
        stage = Stage(
            dtype=dtype,
            images=draw.randint(1, 3),
            size=(draw.randint(5, 12), draw.randint(5, 12)),
            channels=draw.choice([1, 3, 7, 9, 16, 20, 33]),
            rank=draw.randint(1, 140),
            filters=None if form == "conv" else draw.randint(1, 90),
            kernel=kernel,
            stride=stride,
            padding=padding,
            dilation=dilation,
            bias=draw.random() < 0.7,
            addend=not pool and draw.random() < 0.5,
            activation=draw.choice(list(ACTIVATIONS)),
            pool=pool,
        )
        odd = any(size % 2 for size in stage.out_size)
        if min(stage.out_size) < 1 or (pool and odd) or (form == "shifted" and not stage.shiftable):
            continue
        count -= 1
        yield stage


def error(stage: Stage, plan: Plan, device: str) -> float:
    """Relative error of the kernels; raises where something was left unwritten or written beside the output."""
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int, scale: float = 1.0) -> Tensor:
        values = (scale * torch.randn(shape, generator=generator)).to(device, stage.dtype)
        return values.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else values

    taps = stage.channels * math.prod(stage.kernel)
    given = (
        tensor(stage.images, stage.channels, *stage.size),
        tensor(stage.rank, stage.channels, *stage.kernel, scale=taps**-0.5),
        None if stage.filters is None else tensor(stage.filters, stage.rank, 1, 1, scale=stage.rank**-0.5),
        tensor(stage.outputs) if stage.bias else None,
        tensor(stage.images, stage.outputs, *stage.out_size) if stage.addend else None,
    )
    n, d, high, wide = stage.out_shape
    memory = torch.full((n * d * high * wide + 2 * GUARD,), math.nan, dtype=stage.dtype, device=device)
    inside = memory[GUARD:-GUARD]
    run(stage, plan, *given, out=inside.view(n, high, wide, d).permute(0, 3, 1, 2))
    assert not inside.isnan().any(), f"left unwritten: {stage} {plan}"
    assert memory[:GUARD].isnan().all(), f"written before the output: {stage} {plan}"
    assert memory[-GUARD:].isnan().all(), f"written behind the output: {stage} {plan}"
    wanted = run_eagerly(stage, *[None if one is None else one.double() for one in given])
    found = inside.view(n, high, wide, d).permute(0, 3, 1, 2).double()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-6))


def chains(count: int) -> None:
    """Whole layers through the operation, as on a GPU: three factors in two launches, odd maps that are pooled."""
    op.runs_here = lambda x: True
    ready.choose = lambda stage, device, attempt: Plan(
        form="conv" if stage.filters is None else "pair", block_m=32, block_k=16, block_n=16
    )
    draw, worst = random.Random(0), 0.0
    one = [1, 1, 0, 0, 1, 1]
    for number in range(count):
        c, first, second, d = (draw.randint(3, 40) for _ in range(4))
        shapes = [(first, c, 3, 1), (second, first, 1, 3), (d, second, 1, 1)]
        geometry = [2, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, *one]
        if number % 3 == 1:  # spatial: no 1 x 1 layer
            shapes, geometry = [shapes[0], (d, first, 1, 3)], geometry[:12]
        g = torch.Generator().manual_seed(number)
        weights = [torch.randn(shape, generator=g) / math.prod(shape[1:]) ** 0.5 for shape in shapes]
        x = torch.randn(2, c, draw.randint(5, 9), draw.randint(5, 9), generator=g)
        bias = torch.randn(d, generator=g)
        pool = number % 2 == 0
        plain = [x.double(), [weight.double() for weight in weights], bias.double(), None, geometry, "relu"]
        addend = torch.randn(eager(*plain, False).shape, generator=g)
        found = op.factored(x, weights, bias, addend, geometry, "relu", pool)
        wanted = eager(*plain[:3], addend.double(), geometry, "relu", pool)
        assert found.shape == wanted.shape
        assert found.is_contiguous(memory_format=torch.channels_last)
        worst = max(worst, float((found - wanted).norm() / wanted.norm()))
        # Again, now that everything is prepared: with other maps, and with weights that changed.
        weights[-1].mul_(2)
        for map_, more in ((x, addend), (x + 1, addend - 1)):
            found = op.factored(map_, weights, bias, more, geometry, "relu", pool)
            doubles = [weight.double() for weight in weights]
            wanted = eager(map_.double(), doubles, bias.double(), more.double(), geometry, "relu", pool)
            worst = max(worst, float((found - wanted).norm() / wanted.norm()))
        # A new tensor where the last one lay is another one.
        for scale in (1.0, 3.0, 5.0):
            others = [*weights[:-1], weights[-1] * scale]
            found = op.factored(x, others, bias, None, geometry, "relu", pool)
            doubles = [weight.double() for weight in others]
            wanted = eager(x.double(), doubles, bias.double(), None, geometry, "relu", pool)
            worst = max(worst, float((found - wanted).norm() / wanted.norm()))
            del others
        # An addend that is one number a channel.
        small = torch.randn(1, d, 1, 1, generator=g)
        found = op.factored(x, weights, bias, small, geometry, "relu", pool)
        doubles = [weight.double() for weight in weights]
        wanted = eager(x.double(), doubles, bias.double(), small.double(), geometry, "relu", pool)
        worst = max(worst, float((found - wanted).norm() / wanted.norm()))
        assert op.factored(x[:0], weights, bias, None, geometry, "relu", pool).shape == (0, *wanted.shape[1:])
    before = len(ready._kept)
    assert before > 0
    del weights, plain, doubles
    gc.collect()
    assert len(ready._kept) < before, "launches outlive their weights"
    print(json.dumps({"torch.float32": worst, "torch.float16": 0.0}))


def main(form: str, count: int, seed: int) -> None:
    """Largest error by dtype. The interpreter multiplies bfloat16 as if it were whole numbers, so not that one."""
    draw = random.Random(seed)
    worst: dict[str, float] = {}
    for dtype in (torch.float32, torch.float16):
        for stage in stages(form, dtype, count, seed):
            plan = Plan(
                form=form,  # type: ignore[arg-type]
                block_m=draw.choice([32, 64]),
                block_k=16,
                block_n=draw.choice([16, 32]),
                share=draw.choice([1, 2, 5]),
            )
            worst[str(dtype)] = max(worst.get(str(dtype), 0.0), error(stage, plan, "cpu"))
    print(json.dumps(worst))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "chain":
        chains(int(sys.argv[2]))
    else:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
