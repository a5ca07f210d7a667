# mypy: ignore-errors
"""The Triton kernel for maps of many positions: every pixel is read once a line of taps instead of once a tap.

For a filter three taps wide, P_j = sum over the lines of taps and the channels of X W_j is kept for each column j of
taps, at the same positions X; then T[p] = P_0[p - dilation] + P_1[p] + P_2[p + dilation]. The sum is shifted instead of
the input, and d' is far less than the channels. A tile owns the positions whose neighbours it holds too: all but
HALO at both ends. It runs over the ends of lines; what lies across one is left out of the sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leanconv.kernels.tiles import expand, multiply, rounded


@triton.jit
def _shifted(p0, p1, p2, before, after, has_before, has_after, BLOCK_M: tl.constexpr, N: tl.constexpr):
    zero = tl.zeros((BLOCK_M, N), tl.int32)
    left = tl.gather(p0, before[:, None] + zero, axis=0)
    right = tl.gather(p2, after[:, None] + zero, axis=0)
    return p1 + tl.where(has_before[:, None], left, 0.0) + tl.where(has_after[:, None], right, 0.0)


@triton.jit(do_not_specialize=["steps"])
def shifted_kernel(
    x,
    w,
    w2,
    bias,
    addend,
    out,
    lines,  # of the output, over all images; pairs of lines if pooled
    height,
    width,  # of the input and the output
    out_height,
    steps,  # KH x blocks of channels; see tiles.py
    C: tl.constexpr,
    D: tl.constexpr,
    CP: tl.constexpr,
    SK: tl.constexpr,
    SN: tl.constexpr,
    SK2: tl.constexpr,
    SN2: tl.constexpr,
    SH: tl.constexpr,
    PH: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    N: tl.constexpr,  # d' in one piece
    KNOWN: tl.constexpr,  # steps, or 0
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    POOL: tl.constexpr,  # 0 or 2
    HALO: tl.constexpr,  # even if pooled, or windows would lie across tiles
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    TALL: tl.constexpr = 2 if POOL == 2 else 1
    ACROSS: tl.constexpr = BLOCK_M // TALL
    OWNED: tl.constexpr = ACROSS - 2 * HALO
    start = tl.program_id(0) * OWNED - HALO
    tile_row = tl.arange(0, BLOCK_M)
    place = start + tile_row % ACROSS  # along all lines of all images
    total = lines * width
    known = (place >= 0) & (place < total)
    column = place % width
    line = place // width
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
        row = place
        inside = (tile_row >= HALO) & (tile_row < ACROSS - HALO) & (place < total)
    t = rounded(t, w, PRECISION)
    expand(
        t, t, t, t, row, inside, w2, bias, addend, out, 0, (D + BLOCK_N - 1) // BLOCK_N,
        D, SK2, SN2, N, 0, 0, 0, ACTIVATION, HAS_BIAS, HAS_ADDEND, POOL, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip
