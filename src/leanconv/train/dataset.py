"""What is trained on, in an order that depends on nothing but the seed.

Which images a step sees follows from (seed, epoch) alone, and what a dataset draws for an image from (seed, epoch,
index): a run that goes on after being killed, or is shared out over processes, sees what it would have seen. What is
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
                raise _no_labels()
            if self.labelled and labels is not None:
                self._tensors = images, _class_indices(labels)
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
        """The batches of an epoch from step ``start`` on; every process has its share of each.

        ``indices``: in order.
        """
        shuffled = torch.randperm(len(indices), generator=torch.Generator().manual_seed(mixed(seed, epoch)))
        order = [indices[number] for number in shuffled.tolist()]
        together = batch * world
        firsts = range(start * together, self.steps(order, together) * together, together)
        steps = [order[first : first + together] for first in firsts]
        yield from self._batches(_Seeded(self.data, indices, (seed, epoch)), steps, rank, world, self.augment)

    @staticmethod
    def steps(indices: Sequence[int], together: int) -> int:
        """Steps an epoch: a last batch that is not full is left out, unless it is the only one."""
        return max(1, len(indices) // together)

    def plain(self, indices: Sequence[int], *, batch: int, rank: int, world: int) -> Iterator[Batch]:
        """In order, unchanged: for measuring. A process without a share of the last batch is not given it."""
        steps = [indices[first : first + batch * world] for first in range(0, len(indices), batch * world)]
        data = self.data.unchanged() if hasattr(self.data, "unchanged") else self.data
        yield from self._batches(_Seeded(data, indices, (0, 0)), steps, rank, world, None)

    def _batches(
        self, data: _Seeded, steps: Sequence[Sequence[int]], rank: int, world: int, augment: Augment | None
    ) -> Iterator[Batch]:
        mine = [list(step[rank::world]) for step in steps if len(step) > rank]
        counts = [len(step) for step in steps if len(step) > rank]
        if self._tensors is not None:
            images, labels = self._tensors
            loaded: Iterator[tuple[Tensor, Tensor | None]] = (
                (_chosen(images, chosen), None if labels is None else _chosen(labels, chosen)) for chosen in mine
            )
        else:
            loaded = self._loaded(data, mine)
        for chosen, (pictures, classes), count in zip(mine, loaded, counts, strict=True):
            if augment is not None:
                with seeded(mixed(*data.drawn, rank, chosen[0]), pictures.device):
                    pictures = augment(pictures)
            yield Batch(pictures, classes if self.labelled else None, count)

    def _loaded(self, data: _Seeded, steps: list[list[int]]) -> Iterator[tuple[Tensor, Tensor | None]]:
        loader = DataLoader(
            data,
            batch_sampler=steps,
            num_workers=self.workers,
            collate_fn=partial(_collate, labelled=self.labelled),
            generator=torch.Generator(),  # or it would draw from the user's
        )
        for images, labels, bad, trouble in loader:
            self._note(bad)
            if trouble is not None:
                raise LeanconvError(trouble)
            if self.labelled and labels is None:
                raise _no_labels()
            yield images, labels

    def _note(self, bad: list[Unreadable]) -> None:
        if not bad:
            return
        from leanconv.images.loading import refuse_too_many  # what reads pictures is loaded where there are some

        for found in bad:
            if found.name not in self.bad:
                self.bad.append(found.name)
                warn(f"cannot read {found.name} ({found.reason}); the next image is taken.")
        refuse_too_many(self.bad, len(self))


@dataclass(frozen=True)
class Split:
    """What is trained on and what is judged by: examples, and the indices of them, in order. ``held`` may be the same
    examples; no index is then in both."""

    examples: Examples
    training: list[int]
    held: Examples
    held_out: list[int]

    @classmethod
    def of(cls, examples: Examples, held: Examples, *, holdout: float, seed: int, world: int) -> Split:
        """``held`` whole; or, if it is the same as ``examples``, a share ``holdout`` of those."""
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


def _class_indices(labels: Tensor) -> Tensor:
    if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise LeanconvError(
            f"the labels are {labels.dtype} of shape {tuple(labels.shape)}; give one class index, a whole number, an "
            "image."
        )
    return labels.long()


Item = tuple[Any, list[Unreadable]]
Collated = tuple[Tensor, Tensor | None, list[Unreadable], str | None]


class _Seeded(Dataset[Item]):
    """Items with what they draw fixed. In place of an unreadable one stands the next of the same ``part``, which is
    in order: no image that is held out is trained on."""

    def __init__(self, data: Any, part: Sequence[int], drawn: tuple[int, int]):
        self._data, self._part, self.drawn = data, part, drawn

    def __getitem__(self, index: int) -> Item:
        bad: list[Unreadable] = []
        first = bisect_left(self._part, index)
        for number in range(min(10, len(self._part))):
            place = self._part[(first + number) % len(self._part)]
            try:
                with seeded(mixed(*self.drawn, place)):
                    return self._data[place], bad
            except Unreadable as error:
                bad.append(error)
        return None, bad


def _collate(items: list[Item], *, labelled: bool) -> Collated:
    """Images, labels, unreadable ones, and what is wrong: raised in a worker it would be no single sentence."""
    bad = [found for _, several in items for found in several]
    nothing = torch.empty(0)
    pairs = [item if isinstance(item, (tuple, list)) else (item, None) for item, _ in items]
    images = [pair[0] for pair in pairs if len(pair) > 1 and isinstance(pair[0], Tensor)]
    if len(images) < len(pairs):
        return nothing, None, bad, _odd([item for item, _ in items], bad)
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        found = listing(sorted(shapes), 3)
        return nothing, None, bad, f"images have different shapes ({found}); bring them to one size."
    if not labelled or any(pair[1] is None for pair in pairs):
        return torch.stack(images), None, bad, None
    try:
        labels = torch.tensor([operator.index(pair[1]) for pair in pairs])
    except TypeError:
        wrong = type(pairs[0][1]).__name__
        return nothing, None, bad, f"a label is a {wrong}; give class indices, whole numbers."
    return torch.stack(images), labels, bad, None


def _odd(items: list[Any], bad: list[Unreadable]) -> str:
    if any(item is None for item in items):
        names = listing([found.name for found in bad], 3)
        return f"no image can be read among {len(bad)} in a row ({names}); repair or remove them."
    return (
        f"the dataset gives a {type(items[0]).__name__} where an image, a tensor, or a pair of image and class is "
        "needed; give it such items."
    )


def _chosen(part: Tensor, numbers: list[int]) -> Tensor:
    return part[sent(torch.tensor(numbers), part.device)]


def sent(small: Tensor, device: torch.device) -> Tensor:
    """``small`` from the CPU to ``device``. A GPU is not waited for, as it is by what comes from pageable memory."""
    return small.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else small.to(device)


def mixed(*parts: int | str) -> int:
    """A seed from several numbers and words."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little")
