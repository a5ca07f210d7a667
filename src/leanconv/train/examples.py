"""What is trained on, in an order that depends on nothing but the seed.

Which images a step sees, and what is drawn to change them, follows from (seed, epoch, index) alone: a run that goes on
after being killed, or is shared out over processes, sees what it would have seen.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from leanconv.errors import LeanconvError, listing

# More than this share of unreadable pictures means the data, not a picture, is wrong.
TOLERATED = 0.01

Augment = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Batch:
    """``images`` of this process; ``count``: those of all processes in this step. ``labels`` None without any."""

    images: Tensor
    labels: Tensor | None
    count: int


@dataclass
class Examples:
    """Images, with labels or without: tensors in memory, or a dataset that is decoded by ``workers`` processes.

    ``data``: a tensor of images, a pair of tensors, or anything with a length whose items are an image or a pair of
    image and class. ``augment`` changes a batch of images each time it is used for training; it draws on the CPU.
    """

    data: Any
    labelled: bool
    augment: Augment | None = None
    workers: int = 0
    bad: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tensors = _as_tensors(self.data)
        if self._tensors is not None:
            images, labels = self._tensors
            if labels is not None and len(labels) != len(images):
                raise LeanconvError(
                    f"there are {len(images)} images and {len(labels)} labels; give one label an image."
                )
            if self.labelled and labels is None:
                raise LeanconvError(
                    "the data has no labels; give pairs of image and class, or distill from the original."
                )
        elif not (hasattr(self.data, "__len__") and hasattr(self.data, "__getitem__")):
            raise LeanconvError(
                f"data is a {type(self.data).__name__}; give tensors or a dataset with a length and items, so that it "
                "can be shuffled."
            )

    @property
    def tensors(self) -> list[Tensor]:
        """What is in memory."""
        return [] if self._tensors is None else [part for part in self._tensors if part is not None]

    def __len__(self) -> int:
        return len(self._tensors[0]) if self._tensors is not None else len(self.data)

    def training(
        self, indices: Sequence[int], *, batch: int, seed: int, epoch: int, start: int, rank: int, world: int
    ) -> Iterator[Batch]:
        """The batches of an epoch from step ``start`` on; every process has its share of each."""
        shuffled = torch.randperm(len(indices), generator=torch.Generator().manual_seed(_mixed(seed, epoch)))
        order = [indices[number] for number in shuffled.tolist()]
        together = batch * world
        firsts = range(start * together, self.steps(order, together) * together, together)
        steps = [order[first : first + together] for first in firsts]
        yield from self._batches(self.data, steps, rank, world, (seed, epoch), self.augment)

    @staticmethod
    def steps(indices: Sequence[int], together: int) -> int:
        """Steps an epoch: a last batch that is not full is left out, unless it is the only one."""
        return max(1, len(indices) // together)

    def plain(self, indices: Sequence[int], *, batch: int, rank: int, world: int) -> Iterator[Batch]:
        """In order, unchanged: for measuring."""
        steps = [indices[first : first + batch * world] for first in range(0, len(indices), batch * world)]
        data = self.data.unchanged() if hasattr(self.data, "unchanged") else self.data
        yield from self._batches(data, steps, rank, world, (0, 0), None)

    def _batches(
        self,
        data: Any,
        steps: Sequence[Sequence[int]],
        rank: int,
        world: int,
        drawn: tuple[int, int],
        augment: Augment | None,
    ) -> Iterator[Batch]:
        mine = [list(step[rank::world]) for step in steps]
        counts = [len(step) for step in steps]
        if self._tensors is not None:
            images, labels = self._tensors
            loaded: Iterator[tuple[Tensor, Tensor | None]] = (
                (images[chosen], None if labels is None else labels[chosen]) for chosen in mine
            )
        else:
            loaded = self._loaded(data, mine, drawn)
        for number, ((pictures, classes), count) in enumerate(zip(loaded, counts, strict=True)):
            if augment is not None and len(pictures):
                with _seeded(_mixed(*drawn, rank, mine[number][0])):
                    pictures = augment(pictures)
            yield Batch(pictures, classes if self.labelled else None, count)

    def _loaded(
        self, data: Any, steps: list[list[int]], drawn: tuple[int, int]
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        loader = DataLoader(
            _Seeded(data, drawn),
            batch_sampler=steps,
            num_workers=self.workers,
            collate_fn=_collate,
            generator=torch.Generator(),  # or it would draw from the user's
        )
        for images, labels, bad in loader:
            for name in bad:
                if name not in self.bad:
                    self.bad.append(name)
            if len(self.bad) > max(1, TOLERATED * len(self)):
                raise LeanconvError(
                    f"{len(self.bad)} of {len(self)} images cannot be read ({listing(self.bad, 3)}), more than 1 %; "
                    "repair or remove them."
                )
            if self.labelled and labels is None:
                raise LeanconvError(
                    "the data has no labels; give pairs of image and class, or distill from the original."
                )
            yield images, labels


def _no_labels() -> LeanconvError:
    return LeanconvError("the data has no labels; give pairs of image and class, or distil from the original.")


def _as_tensors(data: Any) -> tuple[Tensor, Tensor | None] | None:
    if isinstance(data, Tensor):
        return data, None
    pair = isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)
    return (data[0], data[1]) if pair and data[1].dim() == 1 else None


class Unreadable(Exception):
    """An item of a dataset that cannot be read, by name: another is taken instead."""


class _Seeded(Dataset[tuple[Any, list[str]]]):
    """Items with what they draw fixed. In place of an unreadable one stands the next."""

    def __init__(self, data: Any, drawn: tuple[int, int]):
        self._data, self._drawn = data, drawn

    def __getitem__(self, index: int) -> tuple[Any, list[str]]:
        bad: list[str] = []
        for number in range(min(10, len(self._data))):
            place = (index + number) % len(self._data)
            try:
                with _seeded(_mixed(*self._drawn, place)):
                    return self._data[place], bad
            except Unreadable as error:
                bad.append(str(error))
        raise LeanconvError(f"ten images in a row cannot be read ({listing(bad, 3)}); repair or remove them.")


def _collate(items: list[tuple[Any, list[str]]]) -> tuple[Tensor, Tensor | None, list[str]]:
    bad = [name for _, names in items for name in names]
    pairs = [item if isinstance(item, (tuple, list)) else (item, None) for item, _ in items]
    shapes = {tuple(pair[0].shape) for pair in pairs}
    if len(shapes) > 1:
        raise LeanconvError(f"images have different shapes ({listing(sorted(shapes), 3)}); bring them to one size.")
    images = torch.stack([pair[0] for pair in pairs])
    labels = None if pairs[0][1] is None else torch.tensor([int(pair[1]) for pair in pairs])
    return images, labels, bad


def _mixed(*numbers: int) -> int:
    """A seed from several numbers."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:4], "little")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random numbers from ``seed`` inside the block, the former states afterwards."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.random.set_rng_state(cpu)
