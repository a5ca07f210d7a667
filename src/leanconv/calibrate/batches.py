"""The calibration images, taken once from whatever iterable the user has."""

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

# A plain tensor of images is cut into batches of this size.
CUT = 32

log = logging.getLogger("leanconv")


@dataclass(frozen=True)
class Batch:
    """Images that go through the network together. ``first``: how many images came before, on all ranks.

    ``pieces`` are inputs as the model takes them, usually one; several are tensors that become one on the device.
    ``channels_last``: the network gets them so, whatever they are.
    """

    first: int
    size: int
    pieces: tuple[Any, ...]
    channels_last: bool = False

    def part(self, begin: int, end: int) -> Batch:
        (inputs,) = self.pieces
        return replace(self, first=self.first + begin, size=end - begin, pieces=(_images(inputs, begin, end),))

    def as_given(self) -> Batch:
        """In the layout the user gave them."""
        return replace(self, channels_last=False)

    def on(self, device: torch.device) -> Any:
        """The inputs on ``device``. Always a copy: a network may work on its input in place."""
        if len(self.pieces) == 1:
            return to_device(self.pieces[0], device, channels_last=self.channels_last)
        whole, begin = self._whole(device), 0
        for piece in self.pieces:
            whole[begin : begin + len(piece)].copy_(piece, non_blocking=True)
            begin += len(piece)
        return whole

    @property
    def kind(self) -> Any:
        """What decides which operations a batch runs through, as far as it shows in the batch."""
        if len(self.pieces) > 1:
            return replace(self, pieces=(self._whole("meta"),)).kind
        # Strides as a copy on the device will have them.
        layout = torch.channels_last if self.channels_last else torch.preserve_format
        alike = [torch.empty_like(tensor, device="meta", memory_format=layout) for tensor in tensors(self.pieces)]
        return tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in alike)

    def _whole(self, device: torch.device | str) -> Tensor:
        """Room for all pieces."""
        one, layout = self.pieces[0], torch.channels_last if self.channels_last else torch.contiguous_format
        return torch.empty((self.size, *one.shape[1:]), dtype=one.dtype, device=device, memory_format=layout)


class Batches:
    """The batches of one rank, kept where they were given, in order. Both streams must see the same images.

    ``images`` counts those of all ranks, and with them pictures that turn out to be unreadable: they have a number, by
    which batches are placed, and no more. Where it is known beforehand images are read when they are first asked for,
    so that decoding goes on beside the network.
    """

    def __init__(self, source: Iterator[Any], images: int, *, rank: int = 0, world: int = 1):
        self.images = images
        self._source: Iterator[Any] | None = source
        self.read_at_once = False  # they were all there before anything began
        self._rank, self._world = rank, world
        self._items: list[Batch] = []
        self._read = self._turn = 0
        self._largest: int | None = None  # if batches are to be cut
        self._joined = 0  # if they are to be joined
        self._open: Batch | None = None
        self._channels_last: Any = None  # shape and dtype of the images that are to be so, if any

    @classmethod
    def of(cls, batch: Batch) -> Batches:
        """A batch alone."""
        one = cls(iter(()), batch.size)
        one._items = [batch]
        return one

    def __iter__(self) -> Iterator[Batch]:
        number = 0
        while number < len(self._items) or self._pull():
            yield self._items[number]
            number += 1

    def at_hand(self) -> list[Batch]:
        """Those that need not be read any more."""
        return list(self._items)

    @property
    def there(self) -> int:
        """Images of this rank that have been read."""
        return sum(batch.size for batch in self.at_hand()) + (0 if self._open is None else self._open.size)

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
        self._items = [self._laid_out(batch) for batch in self._items]
        self._open = None if self._open is None else self._laid_out(self._open)

    def _laid_out(self, batch: Batch) -> Batch:
        one = batch.pieces[0]
        alike = isinstance(one, Tensor) and (one.shape[1:], one.dtype) == self._channels_last
        return replace(batch, channels_last=alike)

    def cut(self, largest: int) -> None:
        """No batch of more than ``largest`` images from now on."""
        self._largest, self._joined = largest, 0
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
        batch = self._laid_out(batch)
        if not self._joined:
            self._items += _cut(batch, self._largest or batch.size)
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

    @property
    def largest(self) -> int | None:
        """What batches are cut to, if they are."""
        return self._largest

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
        while self._source is not None:
            try:
                found = next(self._source)
            except StopIteration:
                self._source = None
                self.images = self._read if self._world == 1 else self.images
                break
            if isinstance(found, Batch):  # this rank's already
                self._read = found.first + found.size
                if self._append(found):
                    return True
                continue
            inputs = inputs_of(found)
            size = len(next(tensors(inputs))) if isinstance(inputs, dict) else len(inputs)
            if not size:
                continue
            batch, mine = Batch(self._read, size, (inputs,)), self._turn % self._world == self._rank
            self._read += size
            self._turn += 1
            if mine and self._append(batch):
                return True
        return self._close()


def _joinable(a: Batch, b: Batch) -> bool:
    one, other = a.pieces[-1], b.pieces[0]
    if not (isinstance(one, Tensor) and isinstance(other, Tensor) and a.first + a.size == b.first):
        return False
    alike = one.shape[1:] == other.shape[1:] and one.dtype == other.dtype
    return alike and one.is_contiguous() and other.is_contiguous()


def _cut(batch: Batch, largest: int) -> list[Batch]:
    if batch.size <= largest:
        return [batch]
    if len(batch.pieces) > 1:
        first, parts = batch.first, []
        for piece in batch.pieces:
            parts += _cut(replace(batch, first=first, size=len(piece), pieces=(piece,)), largest)
            first += len(piece)
        return parts
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
        for _ in batches:
            pass
        batches.images, batches.read_at_once = batches._read, True
        if not batches.images:
            raise LeanconvError("images is empty; give at least one batch, better a few thousand images.")
    return batches


def to_device(batch: Any, device: torch.device, *, channels_last: bool = False) -> Any:
    """Always a copy: a network may work on its input in place, and the images are needed again."""
    layout = torch.channels_last if channels_last else torch.preserve_format

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, non_blocking=True, copy=True, memory_format=layout)

    return map_tensors(copied, batch)
