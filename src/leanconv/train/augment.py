"""Pictures changed a little every time they are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2

from leanconv.errors import LeanconvError, whole
from leanconv.images import Picture, Preprocess
from leanconv.train.dataset import Unreadable, sent


def crop_and_flip(padding: int, *, reflect: bool = False, mix: float = 0.0) -> _CropAndFlip:
    """Of tensors: images moved by up to ``padding`` pixels each way, and mirrored half the time. Zeros move in, or with
    ``reflect`` the mirror image: no edge that a network fitted to whole images has not seen. ``mix`` as for
    ``random_views``."""
    return _CropAndFlip(whole("padding", padding, 0), reflect, _share("mix", mix, 0.0))


@dataclass(frozen=True)
class _CropAndFlip:
    padding: int
    reflect: bool
    mix: float

    def __call__(self, images: Tensor) -> Tensor:
        n, _, h, w = images.shape
        wide = F.pad(images, [self.padding] * 4, mode="reflect" if self.reflect else "constant")
        down, right = sent(torch.randint(0, 2 * self.padding + 1, (2, n, 1)), images.device)
        mirrored = sent(torch.rand(n, 1) < 0.5, images.device)
        columns = torch.arange(w, device=images.device).expand(n, w)
        columns = torch.where(mirrored, w - 1 - columns, columns) + right
        rows = torch.arange(h, device=images.device).expand(n, h) + down
        numbers = torch.arange(n, device=images.device)[:, None, None]
        moved = wide[numbers, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
        return _mixed(moved, self.mix) if self.mix else moved


def random_views(smallest: float = 0.4, mix: float = 0.0) -> _RandomViews:
    """Of tensors: a square part of every image, of at least this share of its area, brought back to its size, mirrored
    half the time and a little brighter or darker; a share ``mix`` of the images is mixed with another one, which only
    an original network can name (distillation)."""
    return _RandomViews(_share("smallest", smallest, 1e-3), _share("mix", mix, 0.0))


def _share(name: str, value: float, least: float) -> float:
    if not (isinstance(value, (int, float)) and least <= value <= 1):
        raise LeanconvError(f"{name}={value!r} must be a share from {least:g} to 1.")
    return float(value)


def _mixed(images: Tensor, share: float) -> Tensor:
    """A ``share`` of the images, by chance, mixed with another one."""
    n = len(images)
    own = torch.where(torch.rand(n) < share, torch.rand(n), torch.ones(n)).to(images.dtype)[:, None, None, None]
    return torch.lerp(images[sent(torch.randperm(n), images.device)], images, sent(own, images.device))


@dataclass(frozen=True)
class _RandomViews:
    smallest: float
    mix: float

    def __call__(self, images: Tensor) -> Tensor:
        n = len(images)
        side = torch.empty(n).uniform_(self.smallest, 1.0).sqrt()
        mirror = torch.where(torch.rand(n) < 0.5, -1.0, 1.0)
        place = (1 - side)[:, None] * torch.empty(n, 2).uniform_(-1.0, 1.0)
        zero = torch.zeros(n)
        rows = [torch.stack([side * mirror, zero, place[:, 0]], 1), torch.stack([zero, side, place[:, 1]], 1)]
        grid = F.affine_grid(
            sent(torch.stack(rows, 1).to(images.dtype), images.device), list(images.shape), align_corners=False
        )
        seen = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
        seen = seen * sent(torch.empty(n, 1, 1, 1).uniform_(0.8, 1.2).to(images.dtype), images.device)
        return _mixed(seen, self.mix) if self.mix else seen


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
        except Exception as error:  # a decoder can raise anything on a damaged file
            raise Unreadable(picture.name, type(error).__name__) from None
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
