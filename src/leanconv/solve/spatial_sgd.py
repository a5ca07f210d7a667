"""Jaderberg's data reconstruction: a spatial pair whose responses, not filters, are close to the layer's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leanconv.solve.spatial_svd import SpatialFactors

STEPS, BATCH = 600, 512
# Of the factors' own size; falls to zero along half a cosine.
RATE = 0.02


@dataclass(frozen=True)
class Reconstruction:
    """``errors``: mean squared distance from the targets, at the start and at the end."""

    factors: SpatialFactors
    bias: Tensor
    errors: tuple[float, float]


def reconstruct(
    patches: Tensor, target: Tensor, start: SpatialFactors, bias: Tensor, *, steps: int = STEPS, seed: int = 0
) -> Reconstruction:
    """min over V (r x c x kh), H (d x r x kw), b: sum ||t_i - H V x_i - b||^2, by stochastic gradient descent.

    ``patches`` x: n x c x kh x kw, ``target`` t: n x d. Steps of Adam on batches of 512 from ``start``, whose factors
    are of one size; the better of start and end is returned. Cost a step: 3 x 512 r (c kh kw + d kw) multiply-adds.
    """
    vertical = start.vertical[..., 0].detach().clone().requires_grad_()
    horizontal = start.horizontal[:, :, 0].detach().clone().requires_grad_()
    offset = bias.detach().clone().requires_grad_()
    size = float(vertical.detach().square().mean().sqrt())
    optimizer = torch.optim.Adam([vertical, horizontal, offset], lr=RATE * size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)

    def squared(x: Tensor, t: Tensor) -> Tensor:
        columns = torch.einsum("ncij,rci->nrj", x, vertical)
        return (torch.einsum("nrj,drj->nd", columns, horizontal) + offset - t).square().sum(1)

    @torch.no_grad()
    def error() -> float:
        parts = zip(patches.split(4096), target.split(4096), strict=True)
        return float(torch.stack([squared(x, t).double().sum() for x, t in parts]).sum()) / max(1, len(patches))

    before = error()
    for _ in range(steps):
        chosen = torch.randint(len(patches), (BATCH,), generator=generator).to(patches.device)
        optimizer.zero_grad()
        squared(patches[chosen], target[chosen]).mean().backward()
        optimizer.step()
        schedule.step()
    after = error()
    if not after < before:
        return Reconstruction(start, bias, (before, before))
    factors = SpatialFactors(vertical.detach()[..., None].contiguous(), horizontal.detach()[:, :, None].contiguous())
    return Reconstruction(factors, offset.detach(), (before, after))
