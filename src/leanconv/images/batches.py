"""Pictures as batches, decoded in parallel. A bad picture is named and passed over, many are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from leanconv.errors import LeanconvError, listing
from leanconv.images.find import Picture

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
            return index, f"{type(error).__name__}: {error}"


Item = tuple[int, Tensor | str]


def _as_is(items: list[Item]) -> list[Item]:
    return items


def _warn(text: str) -> None:
    print(f"leanconv: warning: {text}", file=sys.stderr, flush=True)


def stream(
    pictures: Sequence[Picture],
    preprocess: Callable[[bytes], Tensor],
    *,
    batch: int = 32,
    workers: int = 0,
    bad: list[str] | None = None,
    warn: Callable[[str], None] = _warn,
) -> Iterator[tuple[Tensor, list[Picture]]]:
    """Batches of tensors with the pictures they come from.

    Unreadable pictures are named in a warning, appended to ``bad`` and passed over; LeanconvError once they are
    more than 1 % of ``pictures``.
    """
    bad = [] if bad is None else bad
    loader = DataLoader(_Decoded(pictures, preprocess), batch, num_workers=workers, collate_fn=_as_is)
    for items in loader:
        kept: list[tuple[Tensor, Picture]] = []
        for index, outcome in items:
            if isinstance(outcome, Tensor):
                kept.append((outcome, pictures[index]))
                continue
            bad.append(pictures[index].name)
            warn(f"cannot read {pictures[index].name} ({outcome}); it is left out.")
            if len(bad) > TOLERATED * len(pictures):
                raise LeanconvError(
                    f"{len(bad)} of {len(pictures)} images cannot be read ({listing(bad, 3)}), more than 1 %; repair "
                    "or remove them."
                )
        yield from _stacked(kept)


def _stacked(kept: list[tuple[Tensor, Picture]]) -> Iterator[tuple[Tensor, list[Picture]]]:
    if not kept:
        return
    shapes = {tuple(tensor.shape) for tensor, _ in kept}
    if len(shapes) > 1:
        raise LeanconvError(
            f"images come out of preprocessing in different shapes ({listing(sorted(shapes), 3)}); give a size."
        )
    yield torch.stack([tensor for tensor, _ in kept]), [picture for _, picture in kept]


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
