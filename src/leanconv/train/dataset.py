"""Images to train on, in an order that depends on nothing but the seed.

Which images a step sees follows from (seed, epoch) alone, and what a dataset draws for an image from (seed, epoch,
index): a run that goes on after being killed, or is shared by several processes, sees what it would have seen. What is
drawn for a whole batch follows from (seed, epoch, process, its first image).
"""

from __future__ import annotations

import hashlib
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from leanconv.errors import LeanconvError, Unreadable, listing, warn
from leanconv.system.random_state import seeded

Augment = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Batch:
    """``images`` and ``labels`` (None without any) of this process; ``count``: images of all processes in this step."""

    images: Tensor
    labels: Tensor | None
    count: int


@dataclass
class Examples:
    """Images, with labels or without: tensors in memory, or a dataset that ``workers`` processes read.

    ``data``: a tensor of images, a pair of tensors, or anything with a length whose items are an image or a pair of
    image and class. ``augment`` changes a batch of images each time it is used for training; it draws on the CPU.
    ``bad``: names of images that could not be read.
    """

    data: Any
    labelled: bool
    augment: Augment | None = None
    workers: int = 0
    bad: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tensors = _as_tensors(self.data)
        if self._tensors is None:
            if not (hasattr(self.data, "__len__") and hasattr(self.data, "__getitem__")):
                raise LeanconvError(
                    f"data is a {type(self.data).__name__}; give tensors or a dataset with a length and items, so that "
                    "it can be shuffled."
                )
            return
        images, labels = self._tensors
        if labels is not None and len(labels) != len(images):
            raise LeanconvError(f"there are {len(images)} images and {len(labels)} labels; give one label an image.")
        if self.labelled:
            self._tensors = images, _class_indices(labels)

    def __len__(self) -> int:
        return len(self.data if self._tensors is None else self._tensors[0])

    def digest(self) -> str:
        """Of tensors their values, of pictures their names and preprocessing, of other datasets the length."""
        total = hashlib.sha256(str(len(self)).encode())
        for tensor in self._tensors or ():
            if tensor is not None:
                total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if hasattr(self.data, "fingerprint"):
            total.update(self.data.fingerprint().encode())
        return total.hexdigest()

    def training(
        self, indices: Sequence[int], *, batch: int, seed: int, epoch: int, start: int, rank: int, world: int
    ) -> Iterator[Batch]:
        """The batches of an epoch from step ``start`` on; every process has its share of each. ``indices``: sorted."""
        shuffled = torch.randperm(len(indices), generator=torch.Generator().manual_seed(seed_from(seed, epoch)))
        order = [indices[position] for position in shuffled.tolist()]
        together = batch * world
        firsts = range(start * together, self.steps(order, together) * together, together)
        steps = [order[first : first + together] for first in firsts]
        yield from self._batches(_Seeded(self.data, indices, (seed, epoch)), steps, rank, world, self.augment)

    @staticmethod
    def steps(indices: Sequence[int], together: int) -> int:
        """Steps of an epoch, of ``together`` images each: a last batch that is not full is left out, unless it is the
        only one."""
        return max(1, len(indices) // together)

    def plain(self, indices: Sequence[int], *, batch: int, rank: int, world: int) -> Iterator[Batch]:
        """In order, unchanged: for measuring. Processes without a share of the last batch do not get it."""
        steps = [indices[first : first + batch * world] for first in range(0, len(indices), batch * world)]
        data = self.data.unchanged() if hasattr(self.data, "unchanged") else self.data
        yield from self._batches(_Seeded(data, indices, (0, 0)), steps, rank, world, None)

    def _batches(
        self, data: _Seeded, steps: Sequence[Sequence[int]], rank: int, world: int, augment: Augment | None
    ) -> Iterator[Batch]:
        steps = [step for step in steps if len(step) > rank]
        shares = [list(step[rank::world]) for step in steps]
        loaded = self._load(data, shares) if self._tensors is None else self._select(*self._tensors, shares)
        for step, share, (images, labels) in zip(steps, shares, loaded, strict=True):
            if augment is not None:
                with seeded(seed_from(*data.seeds, rank, share[0]), images.device):
                    images = augment(images)
            yield Batch(images, labels if self.labelled else None, len(step))

    def _select(
        self, images: Tensor, labels: Tensor | None, shares: list[list[int]]
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        for share in shares:
            indices = torch.tensor(share)
            there = None if labels is None else labels[send(indices, labels.device)]
            yield images[send(indices, images.device)], there

    def _load(self, data: _Seeded, shares: list[list[int]]) -> Iterator[tuple[Tensor, Tensor | None]]:
        loader = DataLoader(
            data,
            batch_sampler=shares,
            num_workers=self.workers,
            collate_fn=partial(_collate, labelled=self.labelled),
            generator=torch.Generator(),  # or it would draw from the user's
        )
        for images, labels, bad, trouble in loader:
            self._note(bad)
            if trouble is not None:
                raise LeanconvError(trouble)
            yield images, labels

    def _note(self, bad: list[Unreadable]) -> None:
        if not bad:
            return
        from leanconv.images.loading import refuse_too_many  # imports Pillow, which tensors do not need

        for error in bad:
            if error.name not in self.bad:
                self.bad.append(error.name)
                warn(f"cannot read {error.name} ({error.reason}); the next image is taken.")
        refuse_too_many(self.bad, len(self))


@dataclass(frozen=True)
class Split:
    """What is trained on and what is judged by: examples, and sorted indices of them. ``held`` may be the same
    examples; then no index is in both."""

    examples: Examples
    training: list[int]
    held: Examples
    held_out: list[int]

    @classmethod
    def of(cls, examples: Examples, held: Examples, *, holdout: float, seed: int, world: int) -> Split:
        """All of ``held``; or, if it is the same as ``examples``, a share ``holdout`` of those."""
        count = len(examples)
        if count == 0 or len(held) == 0:
            raise LeanconvError(f"the {'validation ' if count else ''}data is empty; give images to train on.")
        if count < world:
            raise LeanconvError(
                f"there are {count} images for {world} processes; give each at least one, or fewer processes."
            )
        if held is not examples:
            return cls(examples, list(range(count)), held, list(range(len(held))))
        out = round(holdout * count)
        if (holdout and out == 0) or count - out < world:
            part = "none to hold out" if out == 0 else "too few to train on"
            raise LeanconvError(
                f"holdout={holdout:g} of {count} images leaves {part}; give more images, another holdout (0 holds out "
                "none), or validation images."
            )
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        return cls(examples, sorted(order[out:]), held, sorted(order[:out]))


def _no_labels() -> LeanconvError:
    return LeanconvError("the data has no labels; give pairs of image and class, or the original to learn from.")


def _as_tensors(data: Any) -> tuple[Tensor, Tensor | None] | None:
    if isinstance(data, Tensor):
        return data, None
    pair = isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)
    # Two tensors of as many dimensions are a dataset of two images.
    return (data[0], data[1]) if pair and data[0].dim() > data[1].dim() > 0 else None


def _class_indices(labels: Tensor | None) -> Tensor:
    if labels is None:
        raise _no_labels()
    if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise LeanconvError(
            f"the labels are {labels.dtype} of shape {tuple(labels.shape)}; give one class index, a whole number, an "
            "image."
        )
    return labels.long()


Item = tuple[Any, list[Unreadable]]


class _Seeded(Dataset[Item]):
    """Items whose random draws are fixed. An unreadable one is replaced by the next of the same ``part``, which is
    sorted: so no image that is held out is trained on."""

    def __init__(self, data: Any, part: Sequence[int], seeds: tuple[int, int]):
        self._data, self._part, self.seeds = data, part, seeds

    def __getitem__(self, index: int) -> Item:
        bad: list[Unreadable] = []
        first = bisect_left(self._part, index)
        for offset in range(min(10, len(self._part))):
            index = self._part[(first + offset) % len(self._part)]
            try:
                with seeded(seed_from(*self.seeds, index)):
                    return self._data[index], bad
            except Unreadable as error:
                bad.append(error)
        return None, bad


def _collate(items: list[Item], *, labelled: bool) -> tuple[Tensor, Tensor | None, list[Unreadable], str | None]:
    """Images, labels, unreadable ones, and what is wrong: raised in a worker, an error is more than one sentence."""
    bad = [error for _, errors in items for error in errors]
    try:
        return *_stack([item for item, _ in items], bad, labelled), bad, None
    except LeanconvError as error:
        return torch.empty(0), None, bad, str(error)


def _stack(items: list[Any], bad: list[Unreadable], labelled: bool) -> tuple[Tensor, Tensor | None]:
    if any(item is None for item in items):
        names = listing([error.name for error in bad], 3)
        raise LeanconvError(f"no image can be read among {len(bad)} in a row ({names}); repair or remove them.")
    pairs = [item if isinstance(item, (tuple, list)) else (item, None) for item in items]
    if not all(len(pair) > 1 and isinstance(pair[0], Tensor) for pair in pairs):
        raise LeanconvError(
            f"the dataset gives a {type(items[0]).__name__} where an image, a tensor, or a pair of image and class is "
            "needed; give it such items."
        )
    shapes = sorted({tuple(pair[0].shape) for pair in pairs})
    if len(shapes) > 1:
        raise LeanconvError(f"images have different shapes ({listing(shapes, 3)}); bring them to one size.")
    images = torch.stack([pair[0] for pair in pairs])
    if not labelled:
        return images, None
    if any(pair[1] is None for pair in pairs):
        raise _no_labels()
    try:
        return images, torch.tensor([operator.index(pair[1]) for pair in pairs])
    except TypeError:
        raise LeanconvError(f"a label is a {type(pairs[0][1]).__name__}; give class indices, whole numbers.") from None


def send(small: Tensor, device: torch.device) -> Tensor:
    """``small`` from the CPU to ``device``, without waiting for a GPU, as a copy from pageable memory would."""
    return small.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else small.to(device)


def seed_from(*parts: int | str) -> int:
    """A seed from several numbers and words."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little")
