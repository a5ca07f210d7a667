"""From an encoded picture to the tensor a network takes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from leanconv.errors import LeanconvError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """Shorter side to ``resize``, centre crop of ``size``, to [0, 1], normalise. ``transform``, a callable on PIL
    images such as the preset that belongs to trained weights, replaces all of it."""

    size: int = 224
    resize: int = 256
    channels: int = 3
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    transform: Callable[[Image.Image], Any] | None = None

    def numbers(self) -> Preprocess | None:
        """The same in numbers, where a preset's transform says them; None where it does not."""
        known: Any = self.transform
        if known is None:
            return self
        if not hasattr(known, "crop_size"):
            return None
        (size,), (resize,) = known.crop_size, known.resize_size
        return Preprocess(
            size=size, resize=resize, channels=self.channels, mean=tuple(known.mean), std=tuple(known.std)
        )

    def to_json(self, preset: str | None = None) -> dict[str, Any]:
        """Plain data. ``preset`` is torchvision's name of the transform, where there is one."""
        return {
            "preset": preset if self.transform is not None else None,
            "size": self.size,
            "resize": self.resize,
            "channels": self.channels,
            "mean": list(self.mean),
            "std": list(self.std),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Preprocess:
        transform = None
        if data["preset"] is not None:
            transform = torchvision.models.get_weight(data["preset"]).transforms()
        return cls(
            size=data["size"],
            resize=data["resize"],
            channels=data["channels"],
            mean=tuple(data["mean"]),
            std=tuple(data["std"]),
            transform=transform,
        )

    def __call__(self, encoded: bytes) -> Tensor:
        picture = self.opened(encoded)
        if self.transform is not None:
            result = self.transform(picture)
            assert isinstance(result, Tensor)
            return result
        if picture.size != (self.size, self.size):
            picture = F.resize(picture, [self.resize], interpolation=InterpolationMode.BILINEAR, antialias=True)
            picture = F.center_crop(picture, [self.size, self.size])
        return normalised(picture, self.mean[: self.channels], self.std[: self.channels])

    def opened(self, encoded: bytes) -> Image.Image:
        """The picture in eight bits, grey or colour as the network takes it."""
        with Image.open(io.BytesIO(encoded)) as opened:
            return _eight_bit(opened).convert("L" if self.channels == 1 else "RGB")


def whole_picture(encoded: bytes) -> Tensor:
    """3 x height x width, values from 0 to 1, nothing cut off: detectors resize and normalise themselves."""
    image: Tensor = F.to_tensor(Preprocess().opened(encoded))
    return image


def normalised(picture: Image.Image, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """channels x height x width, (values in [0, 1] - mean) / std."""
    result: Tensor = (F.to_tensor(picture) - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    return result


def _eight_bit(picture: Image.Image) -> Image.Image:
    """Sixteen-bit grey scaled to eight, which Pillow's own conversion would clip to white."""
    if picture.mode == "F":
        raise ValueError("floating-point pixels, whose range is not known")
    if not picture.mode.startswith("I"):
        return picture
    values = np.asarray(picture).astype(np.float64)
    return Image.fromarray((values / 257).round().clip(0, 255).astype(np.uint8))


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
        numbers = self.preprocess.numbers()
        if numbers is None:
            raise LeanconvError(
                "ten views need sizes, which the network's own preprocessing "
                f"({type(self.preprocess.transform).__name__}) does not say; give --size and --resize."
            )
        return numbers
