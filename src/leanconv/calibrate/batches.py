"""The calibration images in batches, read once from whatever iterable the user has."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

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
    """The batches of one rank, in order, kept as they were given and grouped anew each time they are gone through. Both
    networks must see the same images.

    ``images`` counts those of all ranks, and with them pictures that turn out to be unreadable: they have an index, by
    which batches are ordered, and no more. Where the count is known images are read when they are first asked for, so
    that decoding goes on beside the network.
    """

    def __init__(
        self,
        source: Iterator[Any],
        images: int,
        *,
        rank: int = 0,
        world: int = 1,
        watch: Callable[[Batch], None] = lambda _: None,
    ):
        """``watch`` is called with every batch as it is read, before any image is put aside."""
        self.images = images
        self.aside: list[Any] = []  # inputs that were read and put aside
        self.read_at_once = False  # all were read before anything began
        self.largest: int | None = None  # what batches are cut to, if they are
        self._joined: int | None = None  # what they are joined to, if they are
        self._source: Iterator[Any] | None = source  # None: all of it was read
        self._rank, self._world, self._watch = rank, world, watch
        self._aside = torch.zeros(0, dtype=torch.bool)  # which images are put aside
        self._given: list[Batch] = []
        self._read = self._turn = 0  # images and batches of all ranks
        self._channels_last: Any = None  # shape and dtype of the images that get this layout, if any

    def __iter__(self) -> Iterator[Batch]:
        return self._grouped(self._all())

    def _all(self) -> Iterator[Batch]:
        index = 0
        while index < len(self._given) or self._read_next():
            yield self._given[index]
            index += 1

    def _grouped(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """``batches`` as they go through the network: in its layout, cut or joined."""
        batches = map(self._with_layout, batches)
        if self._joined is None:
            for batch in batches:
                yield from _cut(batch, self.largest or batch.size)
            return
        group: list[Batch] = []
        for batch in batches:
            if group and not _joinable(group[-1], batch):
                yield joined(group)
                group = []
            group.append(batch)
            if sum(part.size for part in group) >= self._joined:
                yield joined(group)
                group = []
        if group:
            yield joined(group)

    def _with_layout(self, batch: Batch) -> Batch:
        form = _form(batch.pieces[0])
        return replace(batch, channels_last=form is not None and form == self._channels_last)

    def put_aside(self, count: int, seed: int) -> None:
        """``count`` of the images of all ranks, drawn by the seed, are not among the batches but in ``aside``. Once,
        and before anybody goes through the batches."""
        self._aside = torch.zeros(self.images, dtype=torch.bool)
        self._aside[torch.randperm(self.images, generator=torch.Generator().manual_seed(seed))[:count]] = True
        self.images -= count
        given, self._given = self._given, []
        self._given = [left for batch in given if (left := self._without_aside(batch)) is not None]
        self._recount()

    def _without_aside(self, batch: Batch) -> Batch | None:
        """What is left of a ``batch`` as it was read, None if nothing is; images are counted without those aside."""
        before, end = int(self._aside[: batch.first].sum()), batch.first + batch.size
        chosen = self._aside[batch.first : end].tolist()
        chosen += [False] * (batch.size - len(chosen))  # more images than were announced
        (inputs,) = batch.pieces
        if any(chosen):
            if not _by_image(inputs, batch.size):
                self._aside[batch.first :] = False  # such batches stay whole, and all behind them
            else:
                self.aside.append(_selected(inputs, chosen))
                inputs = _selected(inputs, [not one for one in chosen])
                batch = replace(batch, size=batch.size - sum(chosen), pieces=(inputs,))
        return replace(batch, first=batch.first - before) if batch.size else None

    def at_hand(self) -> list[Batch]:
        """Those that have been read, as they were given."""
        return list(self._given)

    @property
    def there(self) -> int:
        """Images of this rank that have been read."""
        return sum(batch.size for batch in self._given)

    @property
    def steps(self) -> int:
        """About how many batches there are, for progress."""
        if self._source is None:
            return sum(1 for _ in self)
        size = self._joined or self.largest or (self._given[0].size if self._given else CUT)
        return max(1, -(-self.images // (size * self._world)))

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
        self._channels_last = _form(like)

    def cut(self, largest: int) -> None:
        """No batch of more than ``largest`` images from now on."""
        self.largest, self._joined = largest, None

    def join(self, size: int) -> None:
        """From now on batches of plain tensors of one shape are put together to about ``size`` images."""
        self._joined = size

    def halve(self) -> bool:
        """For a device that has run out of memory; False if no batch can be smaller."""
        size = max((batch.size for batch in self._grouped(self._given)), default=1)
        if size == 1:
            return False
        log.warning("out of memory with %d images a batch; going on with %d.", size, -(-size // 2))
        self.cut(-(-size // 2))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return True

    def _read_next(self) -> bool:
        """Read this rank's next batch; False at the end."""
        if self._source is None:
            return False
        for item in self._source:
            batch = self._of_this_rank(item)
            if batch is None:
                continue
            self._watch(batch)
            batch = self._without_aside(batch)
            if batch is not None:
                self._given.append(batch)
                return True
        self._source = None
        self._recount()
        return False

    def _recount(self) -> None:
        """Once all was read, where this process saw all."""
        if self._source is None and self._world == 1:
            self.images = self._read - int(self._aside[: self._read].sum())

    def _of_this_rank(self, item: Any) -> Batch | None:
        """What the user gave as a batch; None if it is another rank's, or empty."""
        if isinstance(item, Batch):  # placed by an ImageSource
            self._read = item.first + item.size
            return item
        inputs = _inputs_of(item)
        batch = Batch(self._read, len(next(tensors(inputs)) if isinstance(inputs, dict) else inputs), (inputs,))
        if not batch.size:
            return None
        self._read += batch.size
        self._turn += 1
        return batch if (self._turn - 1) % self._world == self._rank else None


def _form(inputs: Any) -> tuple[torch.Size, torch.dtype] | None:
    """What images are alike in; None for other inputs."""
    return (inputs.shape[1:], inputs.dtype) if isinstance(inputs, Tensor) else None


def _joinable(a: Batch, b: Batch) -> bool:
    x, y = a.pieces[-1], b.pieces[0]
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and a.first + a.size == b.first):
        return False
    return _form(x) == _form(y) and x.is_contiguous() and y.is_contiguous()


def joined(batches: list[Batch]) -> Batch:
    pieces = tuple(piece for batch in batches for piece in batch.pieces)
    return replace(batches[0], size=sum(batch.size for batch in batches), pieces=pieces)


def _cut(batch: Batch, largest: int) -> list[Batch]:
    if batch.size <= largest:
        return [batch]
    return [batch.part(begin, min(begin + largest, batch.size)) for begin in range(0, batch.size, largest)]


def take(
    images: Iterable[Any], *, rank: int = 0, world: int = 1, watch: Callable[[Batch], None] = lambda _: None
) -> Batches:
    """Batches of ``images``; those of this ``rank`` of ``world`` processes, which are all given the same images.
    ``watch`` is called with every batch as it is read.

    A shuffling or augmenting loader would give other pictures the second time, so it is read once.
    """
    check_images(images)
    if isinstance(images, Tensor):
        if images.dim() < 2:
            raise LeanconvError(f"images is a tensor of shape {tuple(images.shape)}; give batches, N x C x H x W.")
        images = images.split(CUT)
    count = _count_of(images)
    source = iter(images)
    if isinstance(images, ImageSource):
        source = (Batch(first, len(batch), (batch,)) for first, batch in images.placed_batches(rank, world))
    batches = Batches(source, count or 0, rank=rank, world=world, watch=watch)
    if count is None:
        list(batches)  # read all
        batches.images, batches.read_at_once = batches._read, True
        if not batches.images:
            raise LeanconvError("images is empty; give at least one batch, better a few thousand images.")
    return batches


@runtime_checkable
class ImageSource(Protocol):
    """Images that are read while they are used, such as ``leanconv.images.Pictures``."""

    @property
    def images(self) -> int:
        """How many there are, before any is read; some may turn out to be unreadable."""

    def placed_batches(self, rank: int = 0, world: int = 1) -> Iterator[tuple[int, Tensor]]:
        """This process's batches, each behind the number of images that come before it."""


def check_images(images: Any) -> None:
    """Refuse what gives no batches."""
    if isinstance(images, (str, os.PathLike)):
        raise LeanconvError(
            f"images is the path {os.fspath(images)!r}; give batches of tensors, for example a DataLoader over "
            "torchvision's ImageFolder, or use the command 'leanconv accelerate --images PATH'."
        )
    if not (hasattr(images, "__iter__") or hasattr(images, "__getitem__")):
        raise LeanconvError(
            f"images is a {type(images).__name__}, which cannot be iterated; give batches of images, for example "
            "a DataLoader or a list of tensors."
        )


def _count_of(images: Any) -> int | None:
    """How many images there are, where that can be told without reading them."""
    if isinstance(images, DataLoader) and images.batch_size and not isinstance(images.dataset, IterableDataset):
        try:
            count = len(images.sampler)  # type: ignore[arg-type]
        except TypeError:
            return None
        return count // images.batch_size * images.batch_size if images.drop_last else count
    return images.images if isinstance(images, ImageSource) else None


def _inputs_of(batch: Any) -> Any:
    """The part of a batch the model takes: the tensor itself, or the first of (images, labels, ...)."""
    if isinstance(batch, Tensor):
        if batch.dim() < 2:
            raise LeanconvError(
                f"images gave a tensor of shape {tuple(batch.shape)}; every item must be a batch, N x C x H x W."
            )
        return batch
    if isinstance(batch, (list, tuple)) and batch:
        if all(isinstance(item, Tensor) and item.dim() == 3 for item in batch):
            return list(batch)  # a detector's list of images of different sizes
        if isinstance(batch[0], Tensor):
            return _inputs_of(batch[0])
    if isinstance(batch, dict) and any(True for _ in tensors(batch)):
        return batch  # for a model that takes one
    raise LeanconvError(
        f"images gave a {type(batch).__name__}; every item must be a tensor of images or a tuple that starts with one."
    )


def to_device(inputs: Any, device: torch.device, *, channels_last: bool = False) -> Any:
    """Always a copy: a network may work on its input in place, and the images are needed again."""
    layout = torch.channels_last if channels_last else torch.preserve_format

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, non_blocking=True, copy=True, memory_format=layout)

    return map_tensors(copy, inputs)


def _images(inputs: Any, begin: int, end: int) -> Any:
    if isinstance(inputs, dict):
        return map_tensors(lambda tensor: tensor[begin:end], inputs)
    return inputs[begin:end]


def _by_image(inputs: Any, size: int) -> bool:
    """Whether single images can be taken out of ``inputs``."""
    return isinstance(inputs, list) or all(tensor.dim() > 0 and len(tensor) == size for tensor in tensors(inputs))


def _selected(inputs: Any, chosen: list[bool]) -> Any:
    """A copy of the images that are ``chosen``."""
    if isinstance(inputs, list):
        return list(compress(inputs, chosen))
    index = torch.tensor(chosen).nonzero()[:, 0]  # several times faster than by the mask
    return map_tensors(lambda tensor: tensor.detach().index_select(0, index.to(tensor.device)), inputs)


def out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, could not give the memory asked for."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
