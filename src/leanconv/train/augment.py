"""Images changed a little every time they are used for training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from leanconv.errors import whole
from leanconv.train.dataset import send


def crop_and_flip(padding: int, *, reflect: bool = False) -> _CropAndFlip:
    """A function of image tensors: moves them by up to ``padding`` pixels each way, and mirrors half of them. The edge
    is filled with zeros, or with ``reflect`` with the mirror image, which looks more like a whole image."""
    return _CropAndFlip(whole("padding", padding, 0), reflect)


@dataclass(frozen=True)
class _CropAndFlip:
    padding: int
    reflect: bool

    def __call__(self, images: Tensor) -> Tensor:
        n, _, h, w = images.shape
        padded = F.pad(images, [self.padding] * 4, mode="reflect" if self.reflect else "constant")
        down, right = send(torch.randint(0, 2 * self.padding + 1, (2, n, 1)), images.device)
        mirrored = send(torch.rand(n, 1) < 0.5, images.device)
        columns = torch.arange(w, device=images.device).expand(n, w)
        columns = torch.where(mirrored, w - 1 - columns, columns) + right
        rows = torch.arange(h, device=images.device).expand(n, h) + down
        index = torch.arange(n, device=images.device)[:, None, None]
        return padded[index, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
