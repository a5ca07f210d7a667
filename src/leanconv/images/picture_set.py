"""Pictures as a dataset, for training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from leanconv.errors import LeanconvError, Unreadable
from leanconv.images.loading import why_unreadable
from leanconv.images.picture import Picture
from leanconv.images.preprocess import Preprocess


@dataclass(frozen=True)
class PictureSet:
    """Encoded pictures as a dataset; items are (image, class), or the image where there are no ``classes``.

    ``smallest``: for training, crops of at least this share of the picture's area, mirrored half the time; None takes
    the picture as the network is given it.
    """

    pictures: Sequence[Picture]
    preprocess: Preprocess
    classes: dict[str, int] | None
    smallest: float | None = None

    def __post_init__(self) -> None:
        if self.smallest is not None and self.preprocess.numbers() is None:
            kind = type(self.preprocess.transform).__name__
            raise LeanconvError(
                f"the network's own preprocessing ({kind}) does not say its size, so that crops cannot "
                "be drawn; give --size, or --augment off."
            )

    def fingerprint(self) -> str:
        """What tells these pictures from others: their names, and what is made of them."""
        names = "".join(f"{picture.name} {picture.label} " for picture in self.pictures)
        return names + repr((self.preprocess, self.classes, self.smallest))

    def __len__(self) -> int:
        return len(self.pictures)

    def unchanged(self) -> PictureSet:
        """The same, for measuring."""
        return replace(self, smallest=None)

    def __getitem__(self, index: int) -> Tensor | tuple[Tensor, int]:
        picture = self.pictures[index]
        prepare = self.preprocess if self.smallest is None else self._drawn()
        try:
            image = prepare(picture.read())
        except Exception as error:
            raise Unreadable(picture.name, why_unreadable(error)) from None
        return image if self.classes is None else (image, self.classes[picture.label or ""])

    def _drawn(self) -> Preprocess:
        assert self.smallest is not None
        numbers = self.preprocess.numbers()
        assert numbers is not None
        crop = v2.RandomResizedCrop(
            numbers.size,
            scale=(self.smallest, 1.0),
            ratio=(0.8, 1.25),
            interpolation=getattr(self.preprocess.transform, "interpolation", v2.InterpolationMode.BILINEAR),
            antialias=True,
        )
        mean, std = numbers.mean[: numbers.channels], numbers.std[: numbers.channels]

        def transform(picture: Image.Image) -> Tensor:
            tensor = v2.functional.to_dtype(v2.functional.to_image(crop(picture)), torch.float32, scale=True)
            if float(torch.rand(())) < 0.5:
                tensor = v2.functional.horizontal_flip(tensor)
            normalised: Tensor = v2.functional.normalize(tensor, list(mean), list(std)).as_subclass(Tensor)
            return normalised

        return replace(numbers, transform=transform)
