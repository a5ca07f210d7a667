"""Both halves of a spatial split fitted to data, in turns."""

from __future__ import annotations

import torch
from torch import Tensor

from leanconv.solve.moments import Moments
from leanconv.solve.spatial_svd import SpatialFactors

# Beside the patches there were, white ones of this share of their mean variance. Of white patches alone the split by
# singular values is the best there is; without them directions the patches do not show would be fitted to noise. Of
# 0.01, 0.1 and 1 the last two lose equally little of the responses to pictures that were held out
# (benchmarks/ablation/splits.py).
WHITE = 0.1

# Of conjugate gradients, for the vertical half. The split it begins with is near, and the next turn goes on from here.
STEPS = 12


def swept(split: SpatialFactors, weight: Tensor, patches: Moments, sweeps: int) -> SpatialFactors:
    """min over V (rank x c kh), H (d x kw x rank): sum ||W x - sum_w H_w V x_w||^2, from ``split`` on, with responses
    W x of the filters ``weight`` (d x c x kh x kw) to centred ``patches`` x (n x c kh kw), x_w their kw columns.

    An SVD of the filters alone treats all directions of a patch as equally likely. In pictures neighbours are alike,
    and most of what an SVD keeps never occurs. Fitted to patches, each half is a regression given the other: H on V x,
    with kw rank unknowns per filter, and V on what H makes of it,

        sum_wu H_w^T H_u V S_uw = sum_w H_w^T (W S)_w,    S = sum x x^T + white, in blocks of columns w and u,

    which conjugate gradients solve without its matrix. No sweep raises the error. If the patches never vary, the split
    is returned unchanged.

    Cost: n (c kh kw)^2 multiply-adds before (the moments), and for each sweep STEPS kw^2 rank c kh (c kh + rank), in
    float64; memory of two matrices like the moments' beside these.
    """
    d, c, kh, kw = weight.shape
    scatter = patches.scatter / max(patches.count, 1)
    variance = scatter.diagonal().mean()
    if not bool(variance > 0):
        return split
    scatter.diagonal().add_(WHITE * variance)
    wanted = (weight.to(torch.float64).flatten(1) @ scatter).reshape(d, c * kh, kw)  # W S
    blocks = scatter.reshape(c * kh, kw, c * kh, kw).permute(1, 3, 0, 2).contiguous()  # S_wu: kw x kw x (c kh) x (c kh)
    del scatter
    v = torch.linalg.qr(split.first.to(torch.float64).flatten(1).T).Q.T
    h = _horizontal(v, wanted, blocks)
    for _ in range(sweeps):
        # Rows made orthonormal span the same, and keep the equations for H as well posed as S is.
        v = torch.linalg.qr(_vertical(h, v, wanted, blocks).T).Q.T
        h = _horizontal(v, wanted, blocks)
    balance = h.flatten(0, 1).norm(dim=0).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    vertical = (v * balance[:, None]).reshape(-1, c, kh, 1)
    horizontal = (h / balance).transpose(1, 2)[:, :, None]
    return SpatialFactors(vertical.to(weight.dtype), horizontal.to(weight.dtype).contiguous())


def _horizontal(v: Tensor, wanted: Tensor, blocks: Tensor) -> Tensor:
    """H (d x kw x rank) for given V: (V S V^T over all pairs of columns) H = V (W S)."""
    kw, rank = len(blocks), len(v)
    seen = (v @ blocks @ v.T).transpose(1, 2).reshape(kw * rank, kw * rank)
    right = (v @ wanted).transpose(1, 2).reshape(len(wanted), kw * rank)
    solved: Tensor = torch.linalg.solve(seen, right.T)
    return solved.T.reshape(len(wanted), kw, rank)


def _vertical(h: Tensor, v: Tensor, wanted: Tensor, blocks: Tensor) -> Tensor:
    """V (rank x c kh) nearer to the best one for given H, from ``v`` on: STEPS of conjugate gradients."""
    products = torch.einsum("dwr,dus->uwrs", h, h)  # H_w^T H_u at (u, w), as S_uw lies: blocks are not copied

    def applied(v: Tensor) -> Tensor:
        """sum_wu H_w^T H_u V S_uw."""
        return (products @ (v @ blocks)).sum((0, 1))

    left = torch.einsum("dwr,dxw->rx", h, wanted) - applied(v)
    direction, size = left, left.square().sum()
    tiny = torch.finfo(torch.float64).tiny
    for _ in range(STEPS):
        image = applied(direction)
        step = size / (direction * image).sum().clamp_min(tiny)
        v, left = v + step * direction, left - step * image
        before, size = size, left.square().sum()
        direction = left + (size / before.clamp_min(tiny)) * direction
    return v
