"""Pictures as batches, decoded in parallel. A bad picture is named and left out, many are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from PIL import UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from leanconv.errors import LeanconvError, listing, warn
from leanconv.images.picture import Picture
from leanconv.images.preprocess import whole_picture

# More than this share of unreadable pictures means the data, not a picture, is wrong.
TOLERATED = 0.01

T = TypeVar("T")


def why_unreadable(error: Exception) -> str:
    """The reason a picture cannot be read, for people. A decoder can raise anything on a damaged file."""
    if isinstance(error, LeanconvError):
        return str(error).rstrip(".")
    # Pillow's own message names the place in memory it read from.
    message = "it is no picture in a known format" if isinstance(error, UnidentifiedImageError) else error
    return f"{type(error).__name__}: {message}"


class _Attempts(Dataset[tuple[int, Any]]):
    """What ``read`` makes of each item, with the item's number; where that fails, the reason as a str. An exception
    of a worker process would arrive with its whole traceback in its message."""

    def __init__(self, items: Sequence[Any], read: Callable[[Any], Any]):
        self._items, self._read = items, read

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        try:
            return index, self._read(self._items[index])
        except Exception as error:
            return index, why_unreadable(error)


# What was read, as one tensor where that is asked for and possible; its numbers; numbers and reasons of the rest.
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
    """``read(item)`` of all items, ``batch`` at a time, with their numbers, read by ``workers`` processes.

    ``stack``: one tensor a batch, where all have one shape. ``pin``: memory a GPU can fetch from by itself.
    Items that cannot be read are named in a warning, appended to ``bad`` and left out; LeanconvError once they are
    more than 1 % of all items, or of the number those are ``out_of``.
    """
    bad = [] if bad is None else bad
    collate = partial(_collate, stack=stack)
    loader = DataLoader(_Attempts(items, read), batch, num_workers=workers, collate_fn=collate, pin_memory=pin)
    for read_items, numbers, errors in loader:
        for number, reason in errors:
            bad.append(names[number])
            warn(f"cannot read {names[number]} ({reason}); it is left out.")
            refuse_too_many(bad, out_of or len(items))
        yield read_items, numbers


def refuse_too_many(bad: Sequence[str], total: int) -> None:
    if len(bad) > TOLERATED * total:
        raise LeanconvError(
            f"{len(bad)} of {total} images cannot be read ({listing(bad, 3)}), more than 1 %; repair or remove them."
        )


def _decoded(preprocess: Callable[[bytes], Tensor], picture: Picture) -> Tensor:
    return preprocess(picture.read())


def stream(
    pictures: Sequence[Picture],
    preprocess: Callable[[bytes], Tensor],
    *,
    batch: int = 32,
    **reading: Any,
) -> Iterator[tuple[Tensor, list[Picture]]]:
    """Batches of tensors with the pictures they come from. ``reading``: as of ``read_batches``."""
    read, names = partial(_decoded, preprocess), [picture.name for picture in pictures]
    for tensors, numbers in read_batches(pictures, read, names, batch=batch, stack=True, **reading):
        if len(tensors) > 1:
            shapes = sorted({tuple(tensor.shape) for tensor in tensors})
            raise LeanconvError(
                f"images come out of preprocessing in different shapes ({listing(shapes, 3)}); give a size."
            )
        if tensors:
            yield tensors[0], [pictures[number] for number in numbers]


@dataclass
class Pictures:
    """Pictures as batches, decoded by ``workers`` processes while they are used; once. ``pin``: for a GPU."""

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
        """Every ``world``-th batch, from the ``rank``-th, behind the number of pictures that come before it."""
        starts = range(rank * self.batch, len(self.pictures), self.batch * world)
        mine = [picture for start in starts for picture in self.pictures[start : start + self.batch]]
        number = {id(picture): index for index, picture in enumerate(self.pictures)}
        reading = {"workers": self.workers, "pin": self.pin, "out_of": self.images, "bad": self.unreadable}
        empty = True
        for tensor, read in stream(mine, self.preprocess, batch=self.batch, **reading):
            empty = False
            yield number[id(read[0])], tensor
        if empty and mine:
            raise LeanconvError(f"none of the {len(mine)} images could be read; repair or replace them.")


@dataclass
class WholePictures:
    """Pictures as they are, of any size, with values from 0 to 1, in lists: what a detector takes. Once."""

    pictures: Sequence[Picture]
    batch: int = 8
    workers: int = 0
    unreadable: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[list[Tensor]]:
        read, names = partial(_decoded, whole_picture), [picture.name for picture in self.pictures]
        options: dict[str, Any] = {"batch": self.batch, "workers": self.workers, "bad": self.unreadable}
        yield from (tensors for tensors, _ in read_batches(self.pictures, read, names, **options) if tensors)


def spread(items: Sequence[T], count: int) -> list[T]:
    """``count`` items spread evenly over all, so that every class folder gives some."""
    if count >= len(items):
        return list(items)
    return [items[number * len(items) // count] for number in range(count)]
