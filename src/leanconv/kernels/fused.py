# mypy: ignore-errors
"""The Triton kernels: a convolution of few filters and the 1 x 1 layer behind it in one launch.

``pair_kernel`` sums T = positions x d' over taps and channels into registers, rounds T to the storage dtype as a tensor
in memory would be, and multiplies it by the second factor from there: T never leaves the chip. It reads every pixel
once a tap. ``shifted_kernel`` reads it once a line of taps: it keeps one sum for each of three horizontal taps and adds
them up shifted, which is what maps of many positions and few d' need, whose time is that of reading. Where there are
too few positions to fill the GPU, ``conv_kernel`` shares the channels out among programs (SPLIT) and ``expand_kernel``
adds their sums up. ``conv_kernel`` is also the convolution that has no 1 x 1 layer behind it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leanconv.kernels.tiles import correlate, expand, finish, rounded


@triton.jit(do_not_specialize=["steps"])
def conv_kernel(
    x,
    w,
    bias,
    addend,
    out,  # the output; with SPLIT, sums: shares x positions x SUMS, float32
    positions,
    height,
    width,
    out_height,
    out_width,
    steps,  # of the first product; see tiles.py
    C: tl.constexpr,
    D: tl.constexpr,
    CP: tl.constexpr,
    SK: tl.constexpr,
    SN: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCKS: tl.constexpr,  # of filters
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    N3: tl.constexpr,
    FLAT: tl.constexpr,
    KNOWN: tl.constexpr,  # steps, or 0
    SPLIT: tl.constexpr,  # steps a share; 0: all
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    POOL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Blocks of filters of the same positions one after the other: the second finds the map in the cache.
    tile = tl.program_id(0) // BLOCKS
    at = tl.program_id(0) % BLOCKS * (N0 + N1 + N2 + N3)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    share = tl.program_id(1)
    first = share * SPLIT
    last = tl.minimum(first + SPLIT, steps) if SPLIT > 0 else (KNOWN if KNOWN > 0 else steps)
    a0, a1, a2, a3 = correlate(
        x, w, row, positions, height, width, out_height, out_width, at, first, last,
        C, CP, SK, SN, KH, KW, SH, SW, PH, PW, DH, DW, N0, N1, N2, N3, FLAT, POOL, PRECISION, BLOCK_M, BLOCK_K,
    )  # fmt: skip
    if SPLIT > 0:
        # Sums need no mask beside their rows: they are kept for padded filters too.
        inside = row < positions
        place = out + (share.to(tl.int64) * positions + row)[:, None] * SUMS + at
        tl.store(place + tl.arange(0, N0)[None, :], a0, mask=inside[:, None])
        if N1 > 0:
            tl.store(place + (N0 + tl.arange(0, N1))[None, :], a1, mask=inside[:, None])
        if N2 > 0:
            tl.store(place + (N0 + N1 + tl.arange(0, N2))[None, :], a2, mask=inside[:, None])
        if N3 > 0:
            tl.store(place + (N0 + N1 + N2 + tl.arange(0, N3))[None, :], a3, mask=inside[:, None])
    else:
        if POOL == 1:
            row = tile * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)
            inside = row * 4 < positions
        else:
            inside = row < positions
        finish(
            a0, row, inside, at + tl.arange(0, N0), bias, addend, out,
            D, ACTIVATION, HAS_BIAS, HAS_ADDEND, POOL, BLOCK_M, N0,
        )  # fmt: skip
        if N1 > 0:
            finish(
                a1, row, inside, at + N0 + tl.arange(0, N1), bias, addend, out,
                D, ACTIVATION, HAS_BIAS, HAS_ADDEND, POOL, BLOCK_M, N1,
            )  # fmt: skip
        if N2 > 0:
            finish(
                a2, row, inside, at + N0 + N1 + tl.arange(0, N2), bias, addend, out,
                D, ACTIVATION, HAS_BIAS, HAS_ADDEND, POOL, BLOCK_M, N2,
            )  # fmt: skip
        if N3 > 0:
            finish(
                a3, row, inside, at + N0 + N1 + N2 + tl.arange(0, N3), bias, addend, out,
                D, ACTIVATION, HAS_BIAS, HAS_ADDEND, POOL, BLOCK_M, N3,
            )  # fmt: skip


@triton.jit
def expand_kernel(
    sums,
    w2,
    bias,
    addend,
    out,
    positions,
    shares,
    D: tl.constexpr,
    SUMS: tl.constexpr,
    SK2: tl.constexpr,
    SN2: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    N3: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    POOL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile = tl.program_id(0)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    block = tl.program_id(1)
    mask = (row < positions)[:, None]
    place = sums + row.to(tl.int64)[:, None] * SUMS
    t0 = tl.zeros((BLOCK_M, N0), tl.float32)
    t1 = tl.zeros((BLOCK_M, N1 if N1 > 0 else 16), tl.float32)
    t2 = tl.zeros((BLOCK_M, N2 if N2 > 0 else 16), tl.float32)
    t3 = tl.zeros((BLOCK_M, N3 if N3 > 0 else 16), tl.float32)
    for _ in range(shares):
        t0 += tl.load(place + tl.arange(0, N0)[None, :], mask=mask, other=0.0)
        if N1 > 0:
            t1 += tl.load(place + (N0 + tl.arange(0, N1))[None, :], mask=mask, other=0.0)
        if N2 > 0:
            t2 += tl.load(place + (N0 + N1 + tl.arange(0, N2))[None, :], mask=mask, other=0.0)
        if N3 > 0:
            t3 += tl.load(place + (N0 + N1 + N2 + tl.arange(0, N3))[None, :], mask=mask, other=0.0)
        place += positions * SUMS
    if POOL == 1:
        row = tile * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)
        inside = row * 4 < positions
    else:
        inside = row < positions
    expand(
        rounded(t0, w2, PRECISION), rounded(t1, w2, PRECISION), rounded(t2, w2, PRECISION), rounded(t3, w2, PRECISION),
        row, inside, w2, bias, addend, out, block, block + 1,
        D, SK2, SN2, N0, N1, N2, N3, ACTIVATION, HAS_BIAS, HAS_ADDEND, POOL, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=["steps"])
def pair_kernel(
    x,
    w,
    w2,
    bias,
    addend,
    out,
    positions,
    height,
    width,
    out_height,
    out_width,
    steps,  # of the first product; see tiles.py
    C: tl.constexpr,
    D: tl.constexpr,
    CP: tl.constexpr,
    SK: tl.constexpr,
    SN: tl.constexpr,
    SK2: tl.constexpr,
    SN2: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    N3: tl.constexpr,
    FLAT: tl.constexpr,
    KNOWN: tl.constexpr,  # steps, or 0
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    POOL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile = tl.program_id(0)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    a0, a1, a2, a3 = correlate(
        x, w, row, positions, height, width, out_height, out_width, 0, 0, KNOWN if KNOWN > 0 else steps,
        C, CP, SK, SN, KH, KW, SH, SW, PH, PW, DH, DW, N0, N1, N2, N3, FLAT, POOL, PRECISION, BLOCK_M, BLOCK_K,
    )  # fmt: skip
    if POOL == 1:
        row = tile * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)
        inside = row * 4 < positions
    else:
        inside = row < positions
    expand(
        rounded(a0, w, PRECISION), rounded(a1, w, PRECISION), rounded(a2, w, PRECISION), rounded(a3, w, PRECISION),
        row, inside, w2, bias, addend, out, 0, (D + BLOCK_N - 1) // BLOCK_N,
        D, SK2, SN2, N0, N1, N2, N3, ACTIVATION, HAS_BIAS, HAS_ADDEND, POOL, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip
