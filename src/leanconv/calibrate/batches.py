"""The calibration images, taken once from whatever iterable the user has."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanconv.errors import LeanconvError
from leanconv.network.recording import map_tensors, tensors

# A plain tensor of images is cut into batches of this size.
CUT = 32


@dataclass(frozen=True)
class Batches:
    """Batches as the model takes them, kept where they were given. Both streams must see the same images."""

    items: tuple[Any, ...]
    images: int

    def sample(self) -> Any:
        """Two images where there are two: a network that loops over its batch then shows that it does."""
        first = self.items[0]
        return map_tensors(lambda tensor: tensor[:2], first) if isinstance(first, dict) else first[:2]


def take(images: Iterable[Any]) -> Batches:
    """Read ``images`` once. A shuffling or augmenting loader would give other pictures the second time."""
    if isinstance(images, (str, os.PathLike)):
        raise LeanconvError(
            f"images is the path {os.fspath(images)!r}; give batches of tensors, for example a DataLoader over "
            "torchvision's ImageFolder, or use the command 'leanconv accelerate --images PATH'."
        )
    if isinstance(images, Tensor):
        if images.dim() < 2:
            raise LeanconvError(f"images is a tensor of shape {tuple(images.shape)}; give batches, N x C x H x W.")
        images = images.split(CUT)
    try:
        iterator = iter(images)
    except TypeError:
        raise LeanconvError(
            f"images is a {type(images).__name__}, which cannot be iterated; give batches of images, for example "
            "a DataLoader or a list of tensors."
        ) from None
    items = []
    count = 0
    for batch in iterator:
        inputs = _inputs(batch)
        size = len(next(tensors(inputs))) if isinstance(inputs, dict) else len(inputs)
        if size:
            items.append(inputs)
            count += size
    if not items:
        raise LeanconvError("images is empty; give at least one batch, better a few thousand images.")
    return Batches(tuple(items), count)


def _inputs(batch: Any) -> Any:
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
            return _inputs(batch[0])
    if isinstance(batch, dict) and any(True for _ in tensors(batch)):
        return batch  # for a model that takes one
    raise LeanconvError(
        f"images gave a {type(batch).__name__}; every item must be a tensor of images or a tuple that starts with one."
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """Always a copy: a network may work on its input in place, and the images are needed again."""
    return map_tensors(lambda tensor: tensor.detach().to(device, non_blocking=True, copy=True), batch)
