# mypy: ignore-errors
"""What the Triton kernels are made of.

Maps are channels-last, so a map is a matrix of positions x channels, and a convolution is a sum over the k k taps of
matrix products (an implicit GEMM). A program owns BLOCK_M positions, the rows of its tile.

Columns are cut into up to four powers of two (N0 .. N3, largest first, 0 where unused) whose sum is a multiple of 16:
matrix units take powers of two, and one power of two for all would waste up to half of the work.

Rows of a tile, by POOL: 0 positions one after the other; 1 the four positions of a 2 x 2 pooling window are adjacent
rows; 2 the tile is two lines of the map, and a window is two columns of both.

Names of constants: C channels, D filters that are written, CP rows of the packed filters a tap; SK and SN their strides
along inputs and filters (SK2 and SN2: of the second factor); KH, SH, PH, DH kernel, stride, padding and dilation down,
KW, SW, PW, DW across.

The compiler is told the number of steps (KNOWN) only where it makes no difference to what comes out. Where it takes a
short loop apart, Triton 3.6 lets several products, or one and those of the second factor, read past shared memory, or
leaves them out. Many steps are never taken apart, and a single step of one product with none behind it, the first layer
of most networks, is right and twice as fast so.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "relu6":
        x = tl.minimum(tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), 6.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "hardswish":
        x = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    return x


@triton.jit
def finish(
    acc,  # BLOCK_M x columns, float32
    row,  # where in the output each row (each window, if pooled) goes
    inside,  # which of them this program writes
    column, bias, addend, out,
    D: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ADDEND: tl.constexpr, POOL: tl.constexpr,
    BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Bias, addend, activation and pooling; nothing else writes the output."""
    if HAS_BIAS:
        acc += tl.load(bias + column).to(tl.float32)[None, :]  # padded: no mask
    offset = row.to(tl.int64)[:, None] * D + column[None, :]
    mask = inside[:, None] & (column < D)[None, :]
    if HAS_ADDEND:
        acc += tl.load(addend + offset, mask=mask, other=0.0).to(tl.float32)
    acc = activate(acc, ACTIVATION)
    if POOL == 1:
        acc = tl.max(tl.reshape(acc, (BLOCK_M // 4, 4, COLUMNS)), axis=1)
    elif POOL == 2:
        acc = tl.max(tl.reshape(acc, (2, BLOCK_M // 2, COLUMNS)), axis=0)
        acc = tl.max(tl.reshape(acc, (BLOCK_M // 4, 2, COLUMNS)), axis=1)
    tl.store(out + offset, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def locate(row, out_height, out_width, POOL: tl.constexpr):
    """Image, line and column of a tile's rows."""
    if POOL == 1:
        window = row // 4
        corner = row % 4
        half_width = out_width // 2
        half_height = out_height // 2
        column = (window % half_width) * 2 + corner % 2
        rest = window // half_width
        line = (rest % half_height) * 2 + corner // 2
        image = rest // half_height
    else:
        column = row % out_width
        rest = row // out_width
        line = rest % out_height
        image = rest // out_height
    return image, line, column


@triton.jit
def output_rows(tile, positions, POOL: tl.constexpr, BLOCK_M: tl.constexpr):
    """Where the rows of a tile, or its windows if it is pooled, go in the output, and which of them exist."""
    if POOL == 1:
        row = tile * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)
        inside = row * 4 < positions
    else:
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = row < positions
    return row, inside


@triton.jit
def multiply(a, w, k, first, acc, SK: tl.constexpr, SN: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a (positions x k) times rows ``k``, columns ``first`` .. ``first + N`` of the packed filters."""
    b = tl.load(w + k[:, None] * SK + (first + tl.arange(0, N))[None, :] * SN)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def correlate(
    x, w, row, positions, height, width, out_height, out_width,
    column,  # the first filter
    first_step, last_step,
    C: tl.constexpr, CP: tl.constexpr, SK: tl.constexpr, SN: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    FLAT: tl.constexpr, POOL: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Steps ``first_step`` .. ``last_step`` of the first product. A step is a block of channels of one tap; FLAT, for
    maps of few channels, it is a block of all (tap, channel) pairs in a row."""
    image, line, at = locate(row, out_height, out_width, POOL)
    y = line * SH - PH
    z = at * SW - PW
    pixel = (image.to(tl.int64) * height + y) * width + z
    known = row < positions
    a0 = tl.zeros((BLOCK_M, N0), tl.float32)
    a1 = tl.zeros((BLOCK_M, N1 if N1 > 0 else 16), tl.float32)
    a2 = tl.zeros((BLOCK_M, N2 if N2 > 0 else 16), tl.float32)
    a3 = tl.zeros((BLOCK_M, N3 if N3 > 0 else 16), tl.float32)
    BLOCKS: tl.constexpr = (C + BLOCK_K - 1) // BLOCK_K
    for step in range(first_step, last_step):
        if FLAT:
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            taps = k // C
            down = (taps // KW) * DH
            right = (taps % KW) * DW
            line_in = y[:, None] + down[None, :]
            at_in = z[:, None] + right[None, :]
            mask = known[:, None] & (k < KH * KW * C)[None, :]
            mask = mask & (line_in >= 0) & (line_in < height) & (at_in >= 0) & (at_in < width)
            source = (pixel[:, None] + (down * width + right)[None, :]) * C + (k % C)[None, :]
        else:
            tap = step // BLOCKS
            down = (tap // KW) * DH
            right = (tap % KW) * DW
            channel = (step % BLOCKS) * BLOCK_K + tl.arange(0, BLOCK_K)
            k = tap * CP + channel
            mask = known & (y + down >= 0) & (y + down < height) & (z + right >= 0) & (z + right < width)
            mask = mask[:, None]
            if C % BLOCK_K != 0:
                mask = mask & (channel < C)[None, :]
            source = (pixel + down * width + right)[:, None] * C + channel[None, :]
        a = tl.load(x + source, mask=mask, other=0.0)
        a0 = multiply(a, w, k, column, a0, SK, SN, N0, PRECISION)
        if N1 > 0:
            a1 = multiply(a, w, k, column + N0, a1, SK, SN, N1, PRECISION)
        if N2 > 0:
            a2 = multiply(a, w, k, column + N0 + N1, a2, SK, SN, N2, PRECISION)
        if N3 > 0:
            a3 = multiply(a, w, k, column + N0 + N1 + N2, a3, SK, SN, N3, PRECISION)
    return a0, a1, a2, a3


@triton.jit
def rounded(t, like, PRECISION: tl.constexpr):
    """T as a tensor in memory would hold it. Matrix units cut float32 off after ten bits; this rounds it first."""
    if PRECISION == "tf32":
        t = ((t.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return t.to(like.dtype.element_ty)


@triton.jit
def expand(
    t0, t1, t2, t3, row, inside, w2, bias, addend, out, first, last,
    D: tl.constexpr, SK2: tl.constexpr, SN2: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ADDEND: tl.constexpr, POOL: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The second product, T (BLOCK_M x d') times d' x d, for the blocks ``first`` .. ``last`` of the d filters."""
    for block in range(first, last):
        at = block * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc = multiply(t0, w2, tl.arange(0, N0), at, acc, SK2, SN2, BLOCK_N, PRECISION)
        if N1 > 0:
            acc = multiply(t1, w2, N0 + tl.arange(0, N1), at, acc, SK2, SN2, BLOCK_N, PRECISION)
        if N2 > 0:
            acc = multiply(t2, w2, N0 + N1 + tl.arange(0, N2), at, acc, SK2, SN2, BLOCK_N, PRECISION)
        if N3 > 0:
            acc = multiply(t3, w2, N0 + N1 + N2 + tl.arange(0, N3), at, acc, SK2, SN2, BLOCK_N, PRECISION)
        finish(
            acc, row, inside, at + tl.arange(0, BLOCK_N), bias, addend, out,
            D, ACTIVATION, HAS_BIAS, HAS_ADDEND, POOL, BLOCK_M, BLOCK_N,
        )  # fmt: skip
