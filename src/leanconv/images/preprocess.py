"""From an encoded picture to the tensor a network takes."""

from __future__ import annotations

import io
from collections.abc import Callable
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
    """Shorter side to ``resize``, centre crop of ``size``, to [0, 1], normalise. ``transform``, a function of PIL
    images such as the preset of trained weights, replaces all of it."""

    size: int = 224
    resize: int = 256
    channels: int = 3
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    transform: Callable[[Image.Image], Any] | None = None

    def numbers(self) -> Preprocess | None:
        """The same without ``transform``; None where the transform does not have these numbers."""
        preset: Any = self.transform
        if preset is None:
            return self
        if not hasattr(preset, "crop_size"):
            return None
        (size,), (resize,), mean, std = preset.crop_size, preset.resize_size, tuple(preset.mean), tuple(preset.std)
        return Preprocess(size=size, resize=resize, channels=self.channels, mean=mean, std=std)

    def to_json(self, preset: str | None = None) -> dict[str, Any]:
        """Plain data. ``preset`` is torchvision's name of the transform, where there is one."""
        numbers = {"size": self.size, "resize": self.resize, "channels": self.channels}
        name = None if self.transform is None else preset
        return {"preset": name, **numbers, "mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Preprocess:
        preset = data["preset"]
        transform = None if preset is None else torchvision.models.get_weight(preset).transforms()
        numbers = {name: data[name] for name in ("size", "resize", "channels")}
        return cls(**numbers, mean=tuple(data["mean"]), std=tuple(data["std"]), transform=transform)

    def __call__(self, encoded: bytes) -> Tensor:
        picture = self.decoded(encoded)
        if self.transform is not None:
            result = self.transform(picture)
            assert isinstance(result, Tensor)
            return result
        if picture.size != (self.size, self.size):
            picture = F.resize(picture, [self.resize], interpolation=InterpolationMode.BILINEAR, antialias=True)
            picture = F.center_crop(picture, [self.size, self.size])
        return self.normalised(picture)

    def decoded(self, encoded: bytes) -> Image.Image:
        """The picture in eight bits, grey or colour as the network takes it."""
        with Image.open(io.BytesIO(encoded)) as image:
            return _eight_bit(image).convert("L" if self.channels == 1 else "RGB")

    def normalised(self, picture: Image.Image) -> Tensor:
        """channels x height x width, (values in [0, 1] - mean) / std."""
        mean, std = (torch.tensor(values[: self.channels])[:, None, None] for values in (self.mean, self.std))
        result: Tensor = (F.to_tensor(picture) - mean) / std
        return result


def whole_picture(encoded: bytes) -> Tensor:
    """3 x height x width, values from 0 to 1, nothing cut off: detectors resize and normalise themselves."""
    image: Tensor = F.to_tensor(Preprocess().decoded(encoded))
    return image


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
        numbers = self.preprocess.numbers()
        if numbers is None:
            raise LeanconvError(
                "ten views need sizes, which the network's own preprocessing "
                f"({type(self.preprocess.transform).__name__}) does not say; give --size and --resize."
            )
        if numbers.resize < numbers.size:
            raise LeanconvError(
                f"ten views of {numbers.size} x {numbers.size} do not fit a picture whose shorter side is "
                f"{numbers.resize}; give a --resize of {numbers.size} or more."
            )

    def __call__(self, encoded: bytes) -> Tensor:
        numbers, preset = self.preprocess.numbers(), self.preprocess.transform
        assert numbers is not None
        picture = F.resize(
            self.preprocess.decoded(encoded),
            [numbers.resize],
            interpolation=getattr(preset, "interpolation", InterpolationMode.BILINEAR),
            antialias=getattr(preset, "antialias", True),
        )
        five = torch.stack([numbers.normalised(crop) for crop in F.five_crop(picture, [numbers.size] * 2)])
        return torch.cat([five, five.flip(-1)])
