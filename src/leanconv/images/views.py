"""Ten views of a picture instead of the centre alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from leanconv.errors import LeanconvError
from leanconv.images.preprocess import Preprocess, normalised

VIEWS = 10


@dataclass(frozen=True)
class TenViews:
    """The four corners and the centre of the resized picture, then their mirror images.

    10 x channels x size x size. A picture of the network's own size is resized like any other, so that its corners
    differ from its centre.
    """

    preprocess: Preprocess

    def __post_init__(self) -> None:
        size, resize, *_ = self._numbers()
        if resize < size:
            raise LeanconvError(
                f"ten views of {size} x {size} do not fit a picture whose shorter side is {resize}; give a --resize of "
                f"{size} or more."
            )

    def __call__(self, encoded: bytes) -> Tensor:
        size, resize, interpolation, antialias, mean, std = self._numbers()
        picture = F.resize(self.preprocess.opened(encoded), [resize], interpolation=interpolation, antialias=antialias)
        five = torch.stack([normalised(crop, mean, std) for crop in F.five_crop(picture, [size, size])])
        return torch.cat([five, five.flip(-1)])

    def _numbers(self) -> tuple[int, int, InterpolationMode, bool, tuple[float, ...], tuple[float, ...]]:
        known: Any = self.preprocess.transform
        if known is None:
            depth = self.preprocess.channels
            mean, std = self.preprocess.mean[:depth], self.preprocess.std[:depth]
            return self.preprocess.size, self.preprocess.resize, InterpolationMode.BILINEAR, True, mean, std
        if not hasattr(known, "crop_size"):
            raise LeanconvError(
                f"ten views need sizes, which the network's own preprocessing ({type(known).__name__}) does not say; "
                "give --size and --resize."
            )
        (size,), (resize,) = known.crop_size, known.resize_size
        return size, resize, known.interpolation, known.antialias, tuple(known.mean), tuple(known.std)
