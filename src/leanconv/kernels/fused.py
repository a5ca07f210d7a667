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

from leanconv.kernels.tiles import correlate, expand, finish, multiply, output_rows, rounded


@triton.jit(do_not_specialize=["steps"])
def conv_kernel(
    x, w, bias, addend,
    out,  # the output; with SPLIT, sums: shares x positions x SUMS, float32
    positions, height, width, out_height, out_width,
    steps,  # of the first product; see tiles.py
    C: tl.constexpr, D: tl.constexpr, CP: tl.constexpr, SK: tl.constexpr, SN: tl.constexpr, SUMS: tl.constexpr,
    BLOCKS: tl.constexpr,  # of filters
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, FLAT: tl.constexpr,
    KNOWN: tl.constexpr,  # steps, or 0
    SPLIT: tl.constexpr,  # steps a share; 0: all
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ADDEND: tl.constexpr, POOL: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
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
        sums = out + (share.to(tl.int64) * positions + row)[:, None] * SUMS + at
        tl.store(sums + tl.arange(0, N0)[None, :], a0, mask=inside[:, None])
        if N1 > 0:
            tl.store(sums + (N0 + tl.arange(0, N1))[None, :], a1, mask=inside[:, None])
        if N2 > 0:
            tl.store(sums + (N0 + N1 + tl.arange(0, N2))[None, :], a2, mask=inside[:, None])
        if N3 > 0:
            tl.store(sums + (N0 + N1 + N2 + tl.arange(0, N3))[None, :], a3, mask=inside[:, None])
    else:
        row, inside = output_rows(tile, positions, POOL, BLOCK_M)
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
    x,  # the sums of conv_kernel
    w2, bias, addend, out, positions, shares,
    D: tl.constexpr, SUMS: tl.constexpr, SK2: tl.constexpr, SN2: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ADDEND: tl.constexpr, POOL: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    block = tl.program_id(1)
    mask = (row < positions)[:, None]
    sums = x + row.to(tl.int64)[:, None] * SUMS
    t0 = tl.zeros((BLOCK_M, N0), tl.float32)
    t1 = tl.zeros((BLOCK_M, N1 if N1 > 0 else 16), tl.float32)
    t2 = tl.zeros((BLOCK_M, N2 if N2 > 0 else 16), tl.float32)
    t3 = tl.zeros((BLOCK_M, N3 if N3 > 0 else 16), tl.float32)
    for _ in range(shares):
        t0 += tl.load(sums + tl.arange(0, N0)[None, :], mask=mask, other=0.0)
        if N1 > 0:
            t1 += tl.load(sums + (N0 + tl.arange(0, N1))[None, :], mask=mask, other=0.0)
        if N2 > 0:
            t2 += tl.load(sums + (N0 + N1 + tl.arange(0, N2))[None, :], mask=mask, other=0.0)
        if N3 > 0:
            t3 += tl.load(sums + (N0 + N1 + N2 + tl.arange(0, N3))[None, :], mask=mask, other=0.0)
        sums += positions * SUMS
    row, inside = output_rows(tile, positions, POOL, BLOCK_M)
    expand(
        rounded(t0, w2, PRECISION), rounded(t1, w2, PRECISION), rounded(t2, w2, PRECISION), rounded(t3, w2, PRECISION),
        row, inside, w2, bias, addend, out, block, block + 1,
        D, SK2, SN2, N0, N1, N2, N3, ACTIVATION, HAS_BIAS, HAS_ADDEND, POOL, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=["steps"])
def pair_kernel(
    x, w, w2, bias, addend, out, positions, height, width, out_height, out_width,
    steps,  # of the first product; see tiles.py
    C: tl.constexpr, D: tl.constexpr, CP: tl.constexpr,
    SK: tl.constexpr, SN: tl.constexpr, SK2: tl.constexpr, SN2: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, FLAT: tl.constexpr,
    KNOWN: tl.constexpr,  # steps, or 0
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ADDEND: tl.constexpr, POOL: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    a0, a1, a2, a3 = correlate(
        x, w, row, positions, height, width, out_height, out_width, 0, 0, KNOWN if KNOWN > 0 else steps,
        C, CP, SK, SN, KH, KW, SH, SW, PH, PW, DH, DW, N0, N1, N2, N3, FLAT, POOL, PRECISION, BLOCK_M, BLOCK_K,
    )  # fmt: skip
    row, inside = output_rows(tile, positions, POOL, BLOCK_M)
    expand(
        rounded(a0, w, PRECISION), rounded(a1, w, PRECISION), rounded(a2, w, PRECISION), rounded(a3, w, PRECISION),
        row, inside, w2, bias, addend, out, 0, (D + BLOCK_N - 1) // BLOCK_N,
        D, SK2, SN2, N0, N1, N2, N3, ACTIVATION, HAS_BIAS, HAS_ADDEND, POOL, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _shifted(p0, p1, p2, before, after, has_before, has_after, BLOCK_M: tl.constexpr, N: tl.constexpr):
    zero = tl.zeros((BLOCK_M, N), tl.int32)
    left = tl.gather(p0, before[:, None] + zero, axis=0)
    right = tl.gather(p2, after[:, None] + zero, axis=0)
    return p1 + tl.where(has_before[:, None], left, 0.0) + tl.where(has_after[:, None], right, 0.0)


@triton.jit(do_not_specialize=["steps"])
def shifted_kernel(
    x, w, w2, bias, addend, out,
    lines,  # of the output, over all images; pairs of lines if pooled
    height,
    width,  # of the input and the output
    out_height,
    steps,  # KH x blocks of channels; see tiles.py
    C: tl.constexpr, D: tl.constexpr, CP: tl.constexpr,
    SK: tl.constexpr, SN: tl.constexpr, SK2: tl.constexpr, SN2: tl.constexpr,
    SH: tl.constexpr, PH: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    N: tl.constexpr,  # d' in one piece
    KNOWN: tl.constexpr,  # steps, or 0
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ADDEND: tl.constexpr,
    POOL: tl.constexpr,  # 0 or 2
    HALO: tl.constexpr,  # even if pooled, or windows would lie across tiles
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """For a filter three taps wide.

    P_j = the sum over the lines of taps and the channels of X W_j is kept for each column j of taps, at the same
    positions X; then T[p] = P_0[p - dilation] + P_1[p] + P_2[p + dilation]. The sum is shifted instead of the input,
    and d' is far less than the channels. A tile owns the positions whose neighbours it holds too: all but HALO at both
    ends. It runs over the ends of lines; what lies across one is left out of the sum.
    """
    TALL: tl.constexpr = 2 if POOL == 2 else 1
    ACROSS: tl.constexpr = BLOCK_M // TALL
    OWNED: tl.constexpr = ACROSS - 2 * HALO
    start = tl.program_id(0) * OWNED - HALO
    tile_row = tl.arange(0, BLOCK_M)
    position = start + tile_row % ACROSS  # along all lines of all images
    total = lines * width
    known = (position >= 0) & (position < total)
    column = position % width
    line = position // width
    y = (line % (out_height // TALL) * TALL + tile_row // ACROSS) * SH - PH
    image = line // (out_height // TALL)
    pixel = (image.to(tl.int64) * height + y) * width + column
    p0 = tl.zeros((BLOCK_M, N), tl.float32)
    p1 = tl.zeros((BLOCK_M, N), tl.float32)
    p2 = tl.zeros((BLOCK_M, N), tl.float32)
    BLOCKS: tl.constexpr = (C + BLOCK_K - 1) // BLOCK_K
    for step in range(KNOWN if KNOWN > 0 else steps):
        tap = step // BLOCKS
        down = tap * DH
        channel = (step % BLOCKS) * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = (known & (y + down >= 0) & (y + down < height))[:, None]
        if C % BLOCK_K != 0:
            mask = mask & (channel < C)[None, :]
        a = tl.load(x + (pixel + down * width)[:, None] * C + channel[None, :], mask=mask, other=0.0)
        k = tap * 3 * CP + channel
        p0 = multiply(a, w, k, 0, p0, SK, SN, N, PRECISION)
        p1 = multiply(a, w, k + CP, 0, p1, SK, SN, N, PRECISION)
        p2 = multiply(a, w, k + 2 * CP, 0, p2, SK, SN, N, PRECISION)
    before = tl.maximum(tile_row - DW, 0)
    after = tl.minimum(tile_row + DW, BLOCK_M - 1)
    t = _shifted(p0, p1, p2, before, after, column >= DW, column + DW < width, BLOCK_M, N)
    if POOL == 2:
        # Half a line of windows: start, HALO and the width are even.
        window = tl.arange(0, BLOCK_M // 4)
        row = start // 2 + window
        inside = (window >= HALO // 2) & (window < (ACROSS - HALO) // 2) & (row < total // 2)
    else:
        row = position
        inside = (tile_row >= HALO) & (tile_row < ACROSS - HALO) & (position < total)
    t = rounded(t, w, PRECISION)
    expand(
        t, t, t, t, row, inside, w2, bias, addend, out, 0, (D + BLOCK_N - 1) // BLOCK_N,
        D, SK2, SN2, N, 0, 0, 0, ACTIVATION, HAS_BIAS, HAS_ADDEND, POOL, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip
