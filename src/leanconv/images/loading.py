"""Pictures as batches, decoded in parallel. A bad picture is named and passed over, many are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from PIL import UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from leanconv.errors import LeanconvError, listing, warn
from leanconv.images.picture import Picture
from leanconv.images.preprocess import whole_picture

# More than this share of unreadable pictures means the data, not a picture, is wrong.
TOLERATED = 0.01


class _Decoded(Dataset[tuple[int, Tensor | str]]):
    def __init__(self, pictures: Sequence[Picture], preprocess: Callable[[bytes], Tensor]):
        self._pictures = pictures
        self._preprocess = preprocess

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> tuple[int, Tensor | str]:
        try:
            return index, self._preprocess(self._pictures[index].read())
        except Exception as error:  # a decoder can raise anything on a damaged file
            # Pillow's words name the place in memory it read from.
            said = "it is no picture in a known format" if isinstance(error, UnidentifiedImageError) else error
            return index, f"{type(error).__name__}: {said}"


Item = tuple[int, Tensor | str]


@dataclass
class _Collated:
    """What a worker makes of some pictures: one tensor, or several where their shapes differ."""

    tensors: list[Tensor]
    indices: list[int]
    errors: list[tuple[int, str]]

    def pin_memory(self) -> _Collated:
        """For the loader: memory a GPU can fetch from by itself."""
        return _Collated([tensor.pin_memory() for tensor in self.tensors], self.indices, self.errors)


def _collate(items: list[Item]) -> _Collated:
    kept = [(index, found) for index, found in items if isinstance(found, Tensor)]
    tensors = [tensor for _, tensor in kept]
    if len({tensor.shape for tensor in tensors}) == 1:
        tensors = [torch.stack(tensors)]
    errors = [(index, found) for index, found in items if isinstance(found, str)]
    return _Collated(tensors, [index for index, _ in kept], errors)


def stream(
    pictures: Sequence[Picture],
    preprocess: Callable[[bytes], Tensor],
    *,
    batch: int = 32,
    workers: int = 0,
    pin: bool = False,
    out_of: int | None = None,
    bad: list[str] | None = None,
    warn: Callable[[str], None] = warn,
) -> Iterator[tuple[Tensor, list[Picture]]]:
    """Batches of tensors with the pictures they come from.

    Unreadable pictures are named in a warning, appended to ``bad`` and passed over; LeanconvError once they are
    more than 1 % of ``pictures``, or of as many as those are ``out_of``.
    """
    bad = [] if bad is None else bad
    decoded = _Decoded(pictures, preprocess)
    loader = DataLoader(decoded, batch, num_workers=workers, collate_fn=_collate, pin_memory=pin)
    for found in loader:
        leave_out([(pictures[index].name, why) for index, why in found.errors], bad, out_of or len(pictures), warn)
        if len(found.tensors) > 1:
            shapes = sorted({tuple(tensor.shape) for tensor in found.tensors})
            raise LeanconvError(
                f"images come out of preprocessing in different shapes ({listing(shapes, 3)}); give a size."
            )
        if found.tensors:
            yield found.tensors[0], [pictures[index] for index in found.indices]


def leave_out(
    pictures: Sequence[tuple[str, str]], bad: list[str], total: int, warn: Callable[[str], None] = warn
) -> None:
    """Name pictures that cannot be read, with the reason, and put them to the ``bad`` ones; too many are refused."""
    for name, reason in pictures:
        bad.append(name)
        warn(f"cannot read {name} ({reason}); it is left out.")
        refuse_too_many(bad, total)


def refuse_too_many(bad: Sequence[str], total: int) -> None:
    if len(bad) > TOLERATED * total:
        raise LeanconvError(
            f"{len(bad)} of {total} images cannot be read ({listing(bad, 3)}), more than 1 %; repair or remove them."
        )


@dataclass(frozen=True)
class Placed:
    """A batch and how many pictures come before it."""

    first: int
    images: Tensor


@dataclass
class Pictures:
    """Pictures as batches, decoded by ``workers`` processes while they are used; once. ``pin``: for a GPU."""

    pictures: Sequence[Picture]
    preprocess: Callable[[bytes], Tensor]
    batch: int = 32
    workers: int = 0
    pin: bool = False
    rank: int = 0
    world: int = 1
    unreadable: list[str] = field(default_factory=list)

    @property
    def images(self) -> int:
        return len(self.pictures)

    def shard(self, rank: int, world: int) -> Pictures:
        """Every ``world``-th batch, from the ``rank``-th."""
        self.rank, self.world = rank, world
        return self

    def __iter__(self) -> Iterator[Placed]:
        starts = range(self.rank * self.batch, len(self.pictures), self.batch * self.world)
        mine = [picture for start in starts for picture in self.pictures[start : start + self.batch]]
        number = {id(picture): index for index, picture in enumerate(self.pictures)}
        given = stream(
            mine,
            self.preprocess,
            batch=self.batch,
            workers=self.workers,
            pin=self.pin,
            out_of=self.images,
            bad=self.unreadable,
        )
        empty = True
        for tensor, kept in given:
            empty = False
            yield Placed(number[id(kept[0])], tensor)
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
        decoded = _Decoded(self.pictures, whole_picture)
        for found in DataLoader(decoded, self.batch, num_workers=self.workers, collate_fn=_collate):
            bad = [(self.pictures[index].name, why) for index, why in found.errors]
            leave_out(bad, self.unreadable, len(self.pictures))
            if found.tensors:
                alike = found.tensors[0].dim() == 4
                yield list(found.tensors[0]) if alike else found.tensors


@dataclass
class ReadImages:
    """Batches in memory and the names that could not be read."""

    batches: list[Tensor] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(len(batch) for batch in self.batches)


def read_all(
    pictures: Sequence[Picture],
    preprocess: Callable[[bytes], Tensor],
    *,
    batch: int = 32,
    workers: int = 0,
    step: Callable[[], None] = lambda: None,
) -> ReadImages:
    """All pictures, decoded once. Memory: 4 bytes a number, about 0.6 MB for a 224 x 224 image."""
    read = ReadImages()
    for tensor, _ in stream(pictures, preprocess, batch=batch, workers=workers, bad=read.unreadable):
        read.batches.append(tensor)
        step()
    if not read.batches:
        raise LeanconvError(f"none of the {len(pictures)} images could be read; repair or replace them.")
    return read


def spread(pictures: Sequence[Picture], count: int) -> list[Picture]:
    """``count`` pictures spread evenly over all, so that every class folder gives some."""
    if count >= len(pictures):
        return list(pictures)
    return [pictures[i * len(pictures) // count] for i in range(count)]
