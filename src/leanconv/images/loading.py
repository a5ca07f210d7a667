"""Pictures as batches, decoded in parallel, or as a dataset for training.

A picture that cannot be read is named in a warning and left out; more than 1 % of them are an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from leanconv.errors import LeanconvError, Unreadable, listing, warn
from leanconv.images.picture import Picture
from leanconv.images.preprocess import Preprocess, whole_picture

# With a larger share of unreadable pictures something is wrong with the data as a whole.
TOLERATED = 0.01

T = TypeVar("T")


def _why_unreadable(error: Exception) -> str:
    """The reason a picture cannot be read, for people. A decoder can raise anything on a damaged file."""
    if isinstance(error, LeanconvError):
        return str(error).rstrip(".")
    # Pillow's own message names the address in memory it read from.
    message = "it is no picture in a known format" if isinstance(error, UnidentifiedImageError) else error
    return f"{type(error).__name__}: {message}"


class _Attempts(Dataset[tuple[int, Any]]):
    """(index, ``read(item)``), or (index, reason) where that fails. An exception of a worker process would arrive with
    its whole traceback in its message."""

    def __init__(self, items: Sequence[Any], read: Callable[[Any], Any]):
        self._items, self._read = items, read

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        try:
            return index, self._read(self._items[index])
        except Exception as error:
            return index, _why_unreadable(error)


# Items, or one tensor of all; their indices; (index, reason) of those that cannot be read.
_Collated = tuple[list[Any], list[int], list[tuple[int, str]]]


def _collate(attempts: list[tuple[int, Any]], *, stack: bool) -> _Collated:
    """In a worker, so that one tensor and not many cross over to the main process."""
    read = [(index, item) for index, item in attempts if not isinstance(item, str)]
    items = [item for _, item in read]
    if stack and len({item.shape for item in items}) == 1:
        items = [torch.stack(items)]
    return items, [index for index, _ in read], [pair for pair in attempts if isinstance(pair[1], str)]


def read_batches(
    items: Sequence[Any],
    read: Callable[[Any], Any],
    names: Sequence[str],
    *,
    batch: int,
    workers: int = 0,
    pin: bool = False,
    stack: bool = False,
    out_of: int | None = None,
    bad: list[str] | None = None,
) -> Iterator[tuple[list[Any], list[int]]]:
    """``read(item)`` of all items, ``batch`` at a time, with their indices, read by ``workers`` processes.

    ``stack``: one tensor a batch, where all have one shape. ``pin``: memory a GPU can copy from directly.
    Items that cannot be read are named in a warning, appended to ``bad`` and left out; LeanconvError once they are
    more than 1 % of ``out_of`` (default: of all items).
    """
    bad = [] if bad is None else bad
    collate = partial(_collate, stack=stack)
    loader = DataLoader(_Attempts(items, read), batch, num_workers=workers, collate_fn=collate, pin_memory=pin)
    for read_items, indices, errors in loader:
        for index, reason in errors:
            bad.append(names[index])
            warn(f"cannot read {names[index]} ({reason}); it is left out.")
            refuse_too_many(bad, out_of or len(items))
        yield read_items, indices


def refuse_too_many(bad: Sequence[str], total: int) -> None:
    if len(bad) > TOLERATED * total:
        raise LeanconvError(
            f"{len(bad)} of {total} images cannot be read ({listing(bad, 3)}), more than 1 %; repair or remove them."
        )


def _read_pictures(
    pictures: Sequence[Picture], preprocess: Callable[[bytes], Tensor], **reading: Any
) -> Iterator[tuple[list[Any], list[int]]]:
    names = [picture.name for picture in pictures]
    return read_batches(pictures, partial(_decoded, preprocess), names, **reading)


def _decoded(preprocess: Callable[[bytes], Tensor], picture: Picture) -> Tensor:
    return preprocess(picture.read())


def stream(
    pictures: Sequence[Picture], preprocess: Callable[[bytes], Tensor], *, batch: int = 32, **reading: Any
) -> Iterator[tuple[Tensor, list[Picture]]]:
    """Batches of tensors and the pictures they come from. ``reading``: as of ``read_batches``."""
    for tensors, indices in _read_pictures(pictures, preprocess, batch=batch, stack=True, **reading):
        if len(tensors) > 1:
            shapes = sorted({tuple(tensor.shape) for tensor in tensors})
            raise LeanconvError(
                f"images come out of preprocessing in different shapes ({listing(shapes, 3)}); give a size."
            )
        if tensors:
            yield tensors[0], [pictures[index] for index in indices]


@dataclass
class Pictures:
    """Pictures as batches, decoded by ``workers`` processes while they are used, once. ``pin``: for a GPU."""

    pictures: Sequence[Picture]
    preprocess: Callable[[bytes], Tensor]
    batch: int = 32
    workers: int = 0
    pin: bool = False
    unreadable: list[str] = field(default_factory=list)

    @property
    def images(self) -> int:
        return len(self.pictures)

    def __iter__(self) -> Iterator[Tensor]:
        return (tensor for _, tensor in self.placed_batches())

    def placed_batches(self, rank: int = 0, world: int = 1) -> Iterator[tuple[int, Tensor]]:
        """Every ``world``-th batch, from the ``rank``-th, each after the index of its first picture."""
        starts = range(rank * self.batch, len(self.pictures), self.batch * world)
        mine = [picture for start in starts for picture in self.pictures[start : start + self.batch]]
        index = {id(picture): at for at, picture in enumerate(self.pictures)}
        reading = {"workers": self.workers, "pin": self.pin, "out_of": self.images, "bad": self.unreadable}
        empty = True
        for tensor, read in stream(mine, self.preprocess, batch=self.batch, **reading):
            empty = False
            yield index[id(read[0])], tensor
        if empty and mine:
            raise LeanconvError(f"none of the {len(mine)} images could be read; repair or replace them.")


@dataclass
class WholePictures:
    """Pictures of any size with values from 0 to 1, in lists, as a detector takes them; once."""

    pictures: Sequence[Picture]
    batch: int = 8
    workers: int = 0
    unreadable: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[list[Tensor]]:
        reading: dict[str, Any] = {"batch": self.batch, "workers": self.workers, "bad": self.unreadable}
        yield from (tensors for tensors, _ in _read_pictures(self.pictures, whole_picture, **reading) if tensors)


@dataclass(frozen=True)
class PictureSet:
    """Pictures as a dataset; items are (image, class), or the image alone without ``classes``.

    ``smallest``: for training, random crops of at least this share of the picture's area, mirrored half the time;
    None: the picture as in evaluation.
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
        """Names of the pictures and all settings, to tell this dataset from others."""
        names = "".join(f"{picture.name} {picture.label} " for picture in self.pictures)
        return names + repr((self.preprocess, self.classes, self.smallest))

    def __len__(self) -> int:
        return len(self.pictures)

    def unchanged(self) -> PictureSet:
        """The same without random crops, for evaluation."""
        return replace(self, smallest=None)

    def __getitem__(self, index: int) -> Tensor | tuple[Tensor, int]:
        picture = self.pictures[index]
        prepare = self.preprocess if self.smallest is None else self._augmented(self.smallest)
        try:
            image = prepare(picture.read())
        except Exception as error:
            raise Unreadable(picture.name, _why_unreadable(error)) from None
        return image if self.classes is None else (image, self.classes[picture.label or ""])

    def _augmented(self, smallest: float) -> Preprocess:
        numbers = self.preprocess.numbers()
        assert numbers is not None
        interpolation = getattr(self.preprocess.transform, "interpolation", v2.InterpolationMode.BILINEAR)
        crop = v2.RandomResizedCrop(
            numbers.size, scale=(smallest, 1.0), ratio=(0.8, 1.25), interpolation=interpolation, antialias=True
        )
        mean, std = list(numbers.mean[: numbers.channels]), list(numbers.std[: numbers.channels])

        def transform(picture: Image.Image) -> Tensor:
            tensor = v2.functional.to_dtype(v2.functional.to_image(crop(picture)), torch.float32, scale=True)
            if float(torch.rand(())) < 0.5:
                tensor = v2.functional.horizontal_flip(tensor)
            normalised: Tensor = v2.functional.normalize(tensor, mean, std).as_subclass(Tensor)
            return normalised

        return replace(numbers, transform=transform)


def spread(items: Sequence[T], count: int) -> list[T]:
    """``count`` items spread evenly over all, so that some come from every class folder."""
    if count >= len(items):
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]
