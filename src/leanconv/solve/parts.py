"""Samples to fit to and samples to judge by, of different images."""

from __future__ import annotations

import torch
from torch import Tensor

# With fewer images there is little to judge by.
FEWEST_IMAGES = 8

# One image of so many is held out. Where it is not known which rows an image has, longer blocks are, of an eighth of so
# many images, and as many rows as so many images have around each of them go to neither side.
EACH = 8
CYCLE = 64
MARGIN = 2


def parted(rows: int, images: int, *, alike: bool) -> tuple[Tensor, Tensor] | None:
    """Rows to fit to and an eighth of them to hold out, both rising, which share no image; None with too few images.

    Held out are images spread over all. Where they are not ``alike``, that is of equally many rows, whose a row is is
    judged by the average, and the two sides share no image of up to ``MARGIN`` times as many rows.
    """
    if rows < images or images < FEWEST_IMAGES:
        return None
    cycle, margin = (EACH, 0) if alike else (min(CYCLE, images), MARGIN)
    place = torch.arange(rows) * images // rows % cycle
    block = margin + cycle // EACH
    held = (place >= margin) & (place < block)
    fitted = place >= block + margin
    return torch.nonzero(fitted).flatten(), torch.nonzero(held).flatten()
