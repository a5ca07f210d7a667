"""Ten views of a picture instead of the centre alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from leanconv.errors import LeanconvError
from leanconv.images.preprocess import Preprocess, normalised


@dataclass(frozen=True)
class TenViews:
    """The four corners and the centre of the resized picture, then their mirror images.

    10 x channels x size x size. A picture of the network's own size is resized like any other, so that its corners
    differ from its centre.
    """

    preprocess: Preprocess

    def __post_init__(self) -> None:
        numbers = self._numbers()
        if numbers.resize < numbers.size:
            raise LeanconvError(
                f"ten views of {numbers.size} x {numbers.size} do not fit a picture whose shorter side is "
                f"{numbers.resize}; give a --resize of {numbers.size} or more."
            )

    def __call__(self, encoded: bytes) -> Tensor:
        numbers, known = self._numbers(), self.preprocess.transform
        picture = F.resize(
            self.preprocess.opened(encoded),
            [numbers.resize],
            interpolation=getattr(known, "interpolation", InterpolationMode.BILINEAR),
            antialias=getattr(known, "antialias", True),
        )
        mean, std = numbers.mean[: numbers.channels], numbers.std[: numbers.channels]
        five = torch.stack([normalised(crop, mean, std) for crop in F.five_crop(picture, [numbers.size] * 2)])
        return torch.cat([five, five.flip(-1)])

    def _numbers(self) -> Preprocess:
        found = self.preprocess.numbers()
        if found is None:
            raise LeanconvError(
                "ten views need sizes, which the network's own preprocessing "
                f"({type(self.preprocess.transform).__name__}) does not say; give --size and --resize."
            )
        return found
