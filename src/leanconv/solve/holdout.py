"""Samples to fit to and samples to judge by, of different images."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# With fewer images the held-out part is too small.
FEWEST_IMAGES = 8

# One image of EACH is held out. Where the rows of each image are not known, longer blocks are held out, an EACH-th of
# CYCLE images, and the rows of MARGIN images on each side of a block are not used.
EACH = 8
CYCLE = 64
MARGIN = 2


class Parts(NamedTuple):
    """Row numbers, rising: to fit to, and held out. They have no image in common."""

    fitted: Tensor
    held: Tensor

    def at(self, kept: Tensor, rows: int) -> Parts:
        """The parts of the rows ``kept`` of all ``rows``, as indices into ``kept``."""
        fitted, held = (torch.zeros(rows, dtype=torch.bool) for _ in self)
        fitted[self.fitted] = held[self.held] = True
        return Parts(*(torch.nonzero(part[kept.cpu()]).flatten() for part in (fitted, held)))


def parted(rows: int, images: int, *, alike: bool) -> Parts | None:
    """Hold out an eighth of the rows; None with too few images. Rows are in the order of their images.

    Images that are ``alike`` have equally many rows: every eighth image is held out. Otherwise the image of a row is
    estimated from the average: blocks of up to eight images are held out, and the two parts have no image in common
    that has up to ``MARGIN`` times the average number of rows.
    """
    if rows < images or images < FEWEST_IMAGES:
        return None
    cycle, margin = (EACH, 0) if alike else (min(CYCLE, images), MARGIN)
    place = torch.arange(rows) * images // rows % cycle
    block = margin + cycle // EACH
    held = (place >= margin) & (place < block)
    fitted = place >= block + margin
    return Parts(torch.nonzero(fitted).flatten(), torch.nonzero(held).flatten())
