"""What users give as images: whether it can be read, how many there are, and the part of a batch a model takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from leanconv.errors import LeanconvError
from leanconv.network.function_trace import tensors


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


def count_of(images: Any) -> int | None:
    """How many images there are, where that can be told without reading them."""
    if isinstance(images, DataLoader) and images.batch_size and not isinstance(images.dataset, IterableDataset):
        try:
            count = len(images.sampler)  # type: ignore[arg-type]
        except TypeError:
            return None
        return count // images.batch_size * images.batch_size if images.drop_last else count
    return images.images if isinstance(images, ImageSource) else None


def inputs_of(batch: Any) -> Any:
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
            return inputs_of(batch[0])
    if isinstance(batch, dict) and any(True for _ in tensors(batch)):
        return batch  # for a model that takes one
    raise LeanconvError(
        f"images gave a {type(batch).__name__}; every item must be a tensor of images or a tuple that starts with one."
    )
