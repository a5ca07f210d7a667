"""Images changed a little every time they are trained on, further than ``leanconv.train.augment`` goes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from leanconv.errors import LeanconvError
from leanconv.train.dataset import send


def random_views(smallest: float = 0.4) -> _RandomViews:
    """Of tensors: a square part of every image, of at least this share of its area, brought back to its size, mirrored
    half the time and a little brighter or darker."""
    if not (isinstance(smallest, (int, float)) and 1e-3 <= smallest <= 1):
        raise LeanconvError(f"smallest={smallest!r} must be a share from 0.001 to 1.")
    return _RandomViews(float(smallest))


@dataclass(frozen=True)
class _RandomViews:
    smallest: float

    def __call__(self, images: Tensor) -> Tensor:
        n = len(images)
        side = torch.empty(n).uniform_(self.smallest, 1.0).sqrt()
        mirror = torch.where(torch.rand(n) < 0.5, -1.0, 1.0)
        place = (1 - side)[:, None] * torch.empty(n, 2).uniform_(-1.0, 1.0)
        zero = torch.zeros(n)
        rows = [torch.stack([side * mirror, zero, place[:, 0]], 1), torch.stack([zero, side, place[:, 1]], 1)]
        grid = F.affine_grid(
            send(torch.stack(rows, 1).to(images.dtype), images.device), list(images.shape), align_corners=False
        )
        seen = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
        return seen * send(torch.empty(n, 1, 1, 1).uniform_(0.8, 1.2).to(images.dtype), images.device)
