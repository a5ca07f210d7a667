"""The calibration images in batches, read once from whatever iterable the user has."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from leanconv.calibrate.image_arguments import ImageSource, check_images, count_of, inputs_of
from leanconv.errors import LeanconvError
from leanconv.network.function_trace import map_tensors, tensors

CUT = 32  # images a batch, of a plain tensor

log = logging.getLogger("leanconv")


@dataclass(frozen=True)
class Batch:
    """Images that go through the network together. ``first``: how many images came before, on all ranks.

    ``pieces`` are inputs as the model takes them, usually one; several are tensors that become one on the device.
    ``channels_last``: the network gets them in this layout, whatever theirs is.
    """

    first: int
    size: int
    pieces: tuple[Any, ...]
    channels_last: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """Where its images are among all images, and how many they are."""
        return self.first, self.size

    def part(self, begin: int, end: int) -> Batch:
        (inputs,) = self.pieces
        return replace(self, first=self.first + begin, size=end - begin, pieces=(_images(inputs, begin, end),))

    def as_given(self) -> Batch:
        """In the layout the user gave them."""
        return replace(self, channels_last=False)

    def split(self) -> Iterator[Batch]:
        """A batch for every piece."""
        first = self.first
        for piece in self.pieces:
            size = self.size if len(self.pieces) == 1 else len(piece)
            yield replace(self, first=first, size=size, pieces=(piece,))
            first += size

    def on(self, device: torch.device) -> Any:
        """The inputs on ``device``. Always a copy: a network may work on its input in place."""
        if len(self.pieces) == 1:
            return to_device(self.pieces[0], device, channels_last=self.channels_last)
        whole = self._empty(device)
        for part in self.split():
            begin = part.first - self.first
            whole[begin : begin + part.size].copy_(part.pieces[0], non_blocking=True)
        return whole

    @property
    def kind(self) -> Any:
        """What decides which operations a batch runs through, as far as it shows in the batch."""
        if len(self.pieces) > 1:
            return replace(self, pieces=(self._empty("meta"),)).kind
        # Strides as a copy on the device will have them.
        layout = torch.channels_last if self.channels_last else torch.preserve_format
        copies = [torch.empty_like(tensor, device="meta", memory_format=layout) for tensor in tensors(self.pieces)]
        return tuple((tuple(copy.shape), copy.stride(), copy.dtype) for copy in copies)

    def _empty(self, device: torch.device | str) -> Tensor:
        """A tensor for all pieces."""
        piece, layout = self.pieces[0], torch.channels_last if self.channels_last else torch.contiguous_format
        return torch.empty((self.size, *piece.shape[1:]), dtype=piece.dtype, device=device, memory_format=layout)


class Batches:
    """The batches of one rank, kept where they were given, in order. Both networks must see the same images.

    ``images`` counts those of all ranks, and with them pictures that turn out to be unreadable: they have an index, by
    which batches are ordered, and no more. Where the count is known images are read when they are first asked for, so
    that decoding goes on beside the network.
    """

    def __init__(self, source: Iterator[Any], images: int, *, rank: int = 0, world: int = 1):
        self.images = images
        self.read_at_once = False  # all were read before anything began
        self.largest: int | None = None  # what batches are cut to, if they are
        self._source: Iterator[Any] | None = source
        self._rank, self._world = rank, world
        self._items: list[Batch] = []
        self._read = self._turn = 0  # images and batches of all ranks
        self._joined = 0  # what batches are joined to, if they are
        self._open: Batch | None = None  # one that is being joined
        self._channels_last: Any = None  # shape and dtype of the images that get this layout, if any

    def __iter__(self) -> Iterator[Batch]:
        index = 0
        while index < len(self._items) or self._pull():
            yield self._items[index]
            index += 1

    def at_hand(self) -> list[Batch]:
        """Those that have been read."""
        return list(self._items)

    @property
    def there(self) -> int:
        """Images of this rank that have been read."""
        return sum(batch.size for batch in self._items) + (0 if self._open is None else self._open.size)

    @property
    def steps(self) -> int:
        """About how many batches there are, for progress."""
        size = self._items[0].size if self._items else CUT
        return len(self._items) if self._source is None else max(1, -(-self.images // (size * self._world)))

    def sample(self, size: int = 2) -> Any:
        """The first images. Two, where there are two: a network that loops over its batch then shows that it does."""
        first = next(iter(self), None)
        if first is None and self._world == 1:
            raise LeanconvError("images is empty; give at least one batch, better a few thousand images.")
        if first is None:
            raise LeanconvError(
                f"there are fewer batches of images than the {self._world} processes; give smaller batches or run "
                "fewer processes."
            )
        return _images(first.pieces[0], 0, size)

    def channels_last(self, like: Tensor | None) -> None:
        """From now on batches of images ``like`` these are given to the network channels-last, and no others."""
        self._channels_last = None if like is None else (like.shape[1:], like.dtype)
        self._items = [self._with_layout(batch) for batch in self._items]
        self._open = None if self._open is None else self._with_layout(self._open)

    def _with_layout(self, batch: Batch) -> Batch:
        piece = batch.pieces[0]
        alike = isinstance(piece, Tensor) and (piece.shape[1:], piece.dtype) == self._channels_last
        return replace(batch, channels_last=alike)

    def cut(self, largest: int) -> None:
        """No batch of more than ``largest`` images from now on."""
        self.largest, self._joined = largest, 0
        self._close()
        self._items = [part for batch in self._items for part in _cut(batch, largest)]

    def join(self, size: int) -> None:
        """Put batches of plain tensors together to about ``size`` images, as far as they are of one shape."""
        self._joined = size
        items, self._items = self._items, []
        for batch in items:
            self._append(batch)
        if self._source is None:
            self._close()

    def _append(self, batch: Batch) -> bool:
        """Whether that completed a batch."""
        batch = self._with_layout(batch)
        if not self._joined:
            self._items += _cut(batch, self.largest or batch.size)
            return True
        complete = False
        if self._open is not None and _joinable(self._open, batch):
            together = (*self._open.pieces, *batch.pieces)
            batch = replace(self._open, size=self._open.size + batch.size, pieces=together)
        else:
            complete = self._close()
        self._open = batch
        return self._close() if batch.size >= self._joined else complete

    def _close(self) -> bool:
        if self._open is None:
            return False
        self._items.append(self._open)
        self._open = None
        return True

    def halve(self) -> bool:
        """For a device that has run out of memory; False if that is no way out."""
        size = max((batch.size for batch in self._items), default=1)
        if size == 1:
            return False
        log.warning("out of memory with %d images a batch; going on with %d.", size, -(-size // 2))
        self.cut(-(-size // 2))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return True

    def _pull(self) -> bool:
        """Read on to this rank's next batch; False at the end."""
        if self._source is not None:
            for item in self._source:
                batch = self._of_this_rank(item)
                if batch is not None and self._append(batch):
                    return True
            self._source = None
            self.images = self._read if self._world == 1 else self.images
        return self._close()

    def _of_this_rank(self, item: Any) -> Batch | None:
        """What the user gave as a batch; None if it is another rank's, or empty."""
        if isinstance(item, Batch):  # placed by an ImageSource
            self._read = item.first + item.size
            return item
        inputs = inputs_of(item)
        batch = Batch(self._read, len(next(tensors(inputs)) if isinstance(inputs, dict) else inputs), (inputs,))
        if not batch.size:
            return None
        self._read += batch.size
        self._turn += 1
        return batch if (self._turn - 1) % self._world == self._rank else None


def _joinable(a: Batch, b: Batch) -> bool:
    x, y = a.pieces[-1], b.pieces[0]
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and a.first + a.size == b.first):
        return False
    return (x.shape[1:], x.dtype) == (y.shape[1:], y.dtype) and x.is_contiguous() and y.is_contiguous()


def _cut(batch: Batch, largest: int) -> list[Batch]:
    if batch.size <= largest:
        return [batch]
    if len(batch.pieces) > 1:
        return [part for piece in batch.split() for part in _cut(piece, largest)]
    return [batch.part(begin, min(begin + largest, batch.size)) for begin in range(0, batch.size, largest)]


def _images(inputs: Any, begin: int, end: int) -> Any:
    if isinstance(inputs, dict):
        return map_tensors(lambda tensor: tensor[begin:end], inputs)
    return inputs[begin:end]


def out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, could not give the memory asked for."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def take(images: Iterable[Any], *, rank: int = 0, world: int = 1) -> Batches:
    """Batches of ``images``; those of this ``rank`` of ``world`` processes, which are all given the same images.

    A shuffling or augmenting loader would give other pictures the second time, so it is read once.
    """
    check_images(images)
    if isinstance(images, Tensor):
        if images.dim() < 2:
            raise LeanconvError(f"images is a tensor of shape {tuple(images.shape)}; give batches, N x C x H x W.")
        images = images.split(CUT)
    count = count_of(images)
    source = iter(images)
    if isinstance(images, ImageSource):
        source = (Batch(first, len(batch), (batch,)) for first, batch in images.placed_batches(rank, world))
    batches = Batches(source, count or 0, rank=rank, world=world)
    if count is None:
        list(batches)  # read all
        batches.images, batches.read_at_once = batches._read, True
        if not batches.images:
            raise LeanconvError("images is empty; give at least one batch, better a few thousand images.")
    return batches


def to_device(batch: Any, device: torch.device, *, channels_last: bool = False) -> Any:
    """Always a copy: a network may work on its input in place, and the images are needed again."""
    layout = torch.channels_last if channels_last else torch.preserve_format

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, non_blocking=True, copy=True, memory_format=layout)

    return map_tensors(copy, batch)
