"""Samples to fit to and samples to judge by, of different images."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# With fewer images there is little to judge by.
FEWEST_IMAGES = 8

# One image of so many is held out. Where it is not known which rows an image has, longer blocks are, of an eighth of so
# many images, and as many rows as so many images have around each of them go to neither side.
EACH = 8
CYCLE = 64
MARGIN = 2


class Parts(NamedTuple):
    """Row numbers, rising: to fit to, and held out. They share no image."""

    fitted: Tensor
    held: Tensor

    def at(self, kept: Tensor, rows: int) -> Parts:
        """Of ``kept`` ones of all ``rows``, counted anew."""
        fitted, held = (torch.zeros(rows, dtype=torch.bool) for _ in self)
        fitted[self.fitted] = held[self.held] = True
        return Parts(*(torch.nonzero(part[kept.cpu()]).flatten() for part in (fitted, held)))


def parted(rows: int, images: int, *, alike: bool) -> Parts | None:
    """An eighth of the rows held out; None with too few images. Rows are in the order of their images.

    Where images are ``alike``, of equally many rows, it is every eighth of them. Where they are not, whose a row is is
    judged by the average: blocks of rows are held out, of up to eight images each, and the two sides share no image of
    up to ``MARGIN`` times as many rows as the average.
    """
    if rows < images or images < FEWEST_IMAGES:
        return None
    cycle, margin = (EACH, 0) if alike else (min(CYCLE, images), MARGIN)
    place = torch.arange(rows) * images // rows % cycle
    block = margin + cycle // EACH
    held = (place >= margin) & (place < block)
    fitted = place >= block + margin
    return Parts(torch.nonzero(fitted).flatten(), torch.nonzero(held).flatten())
