"""One step of a factorised layer, and the ways it can be computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from leanconv.system.precision import tf32

# As torch's functions; ``tiles.activate`` is the same on the GPU.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "gelu": F.gelu,
    "hardswish": F.hardswish,
}
# A map of fewer channels is read as (tap, channel) pairs in a row: 16 channels a tap would be mostly padding.
FEW_CHANNELS = 8
# The most columns one program sums up; BLOCK_M x this many float32 must fit the registers.
WIDEST = 320
# Filters are packed in multiples of this, so that blocks of any size up to it need no mask.
PACKED = 128

Pair = tuple[int, int]
Form = Literal["eager", "conv", "pair", "shifted", "split"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A convolution and, where there are ``filters``, the 1 x 1 layer behind it, with what follows; on a given map."""

    dtype: torch.dtype
    images: int
    size: Pair
    channels: int
    rank: int  # filters of the convolution
    filters: int | None
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    bias: bool
    addend: bool
    activation: str
    pool: bool

    @property
    def out_size(self) -> Pair:
        """Of the convolution, before pooling."""
        high, wide = (
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, p, d, k, s in zip(self.size, self.padding, self.dilation, self.kernel, self.stride, strict=True)
        )
        return high, wide

    @property
    def outputs(self) -> int:
        return self.rank if self.filters is None else self.filters

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        high, wide = self.out_size
        window = 2 if self.pool else 1
        return self.images, self.outputs, high // window, wide // window

    @property
    def positions(self) -> int:
        high, wide = self.out_size
        return self.images * high * wide

    @property
    def flat(self) -> bool:
        return self.channels <= FEW_CHANNELS

    @property
    def columns(self) -> int:
        """The rank, padded: to 16, or where one program cannot sum all of it up, to blocks of ``PACKED``."""
        padded = up(self.rank, 16)
        return padded if padded <= (256 if self.filters is None else WIDEST) else up(self.rank, PACKED)

    @property
    def shiftable(self) -> bool:
        """Whether ``shifted_kernel`` can compute it: three taps wide, as wide a map behind it as before, few d'."""
        along = (self.kernel[1], self.stride[1], self.padding[1]) == (3, 1, self.dilation[1])
        few = self.columns in (16, 32, 64)
        return along and few and not self.flat and self.filters is not None and self.dilation[1] <= 4

    @property
    def words(self) -> str:
        """The key of a measured choice. Maps of similar size share one."""
        numbers = (self.kernel, self.stride, self.padding, self.dilation)
        shape = "/".join("x".join(map(str, pair)) for pair in numbers)
        flags = "".join("01"[flag] for flag in (self.bias, self.addend, self.pool))
        size = f"{(self.positions - 1).bit_length()}.{(self.size[1] - 1).bit_length()}"
        layer = f"{self.channels}-{self.rank}-{self.filters} {shape} {self.activation} {flags}"
        return f"{str(self.dtype)[6:]} {precision(self.dtype)} {size} {layer}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A way to compute a stage. ``share``: steps a program, in the form "split"."""

    form: Form
    block_m: int = 0
    block_k: int = 0
    block_n: int = 0
    warps: int = 4
    depth: int = 3  # blocks on their way from memory while one is computed with
    share: int = 0


EAGER = Plan(form="eager")


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def powers(columns: int) -> list[int]:
    """A multiple of 16 as a sum of powers of two, largest first.

    >>> powers(208)
    [128, 64, 16]
    """
    parts = []
    while columns:
        parts.append(1 << (columns.bit_length() - 1))
        columns -= parts[-1]
    return parts


def steps(stage: Stage, block_k: int) -> int:
    """Blocks of channels, over all taps."""
    taps = stage.kernel[0] * stage.kernel[1]
    return -(-taps * stage.channels // block_k) if stage.flat else taps * -(-stage.channels // block_k)


def plans(stage: Stage, processors: int) -> list[Plan]:
    """What is worth measuring on a GPU of so many multiprocessors, the likeliest first; "eager" is the last."""
    k = _block_k(stage)
    wide = stage.columns > 128
    if wide and precision(stage.dtype) == "tf32x3":  # three times the operands do not fit beside so many sums
        return [EAGER]
    likely: list[Plan] = []
    if stage.filters is None:
        likely += [
            Plan(form="conv", block_m=m, block_k=k, warps=warps, depth=depth)
            for m, warps, depth in ((128, 8, 3), (128, 4, 4), (64, 4, 4), (32, 4, 4))
            if not (wide and (m, warps) == (128, 4)) and (m > 32 or stage.positions < 64 * processors)
        ]
        return [*likely, EAGER]
    few = stage.positions <= 64 * processors
    if stage.shiftable and not few:
        likely += [
            Plan(form="shifted", block_m=m, block_k=k, block_n=64, warps=warps, depth=depth)
            for m, warps, depth in ((128, 4, 2), (128, 4, 3), (128, 8, 3), (64, 4, 3))
            if 3 * stage.columns * m <= warps * 32 * 152 and (m > 64 or stage.positions <= 256 * processors)
        ]
    if stage.columns <= WIDEST:
        likely += [
            Plan(form="pair", block_m=m, block_k=k, block_n=64, warps=warps, depth=depth)
            for m, warps, depth in ((128, 8, 3), (128, 8, 4), (128, 4, 3), (64, 4, 3))
            if stage.columns * m <= warps * 32 * 160 and (m == 128 or few or wide)
        ]
    if few and stage.columns <= WIDEST:
        total = steps(stage, k)
        likely += [
            Plan(form="split", block_m=m, block_k=k, block_n=64, warps=4, depth=4, share=-(-total // parts))
            for m in ((64,) if wide else (32, 64))
            for parts in (4, 9, 18)
            if total >= 2 * parts
        ]
    return [*dict.fromkeys(likely), EAGER]


def _block_k(stage: Stage) -> int:
    """Channels a step: as many as fill 128 bytes, the width of a line of the cache and of shared memory's swizzle."""
    line = 32 if stage.dtype == torch.float32 else 64
    if stage.flat:
        return min(line, max(16, 1 << (stage.kernel[0] * stage.kernel[1] * stage.channels - 1).bit_length()))
    return min(line, max(16, 1 << (stage.channels - 1).bit_length()))


def precision(dtype: torch.dtype) -> str:
    """How matrix units multiply: half precision as it is; float32 with ten bits of mantissa (TF32) if the user allows
    it, else as three such products, which together are as exact as float32."""
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if tf32() else "tf32x3"
