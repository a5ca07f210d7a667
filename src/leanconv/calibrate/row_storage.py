"""Rows that come piece by piece, each written at once where it will stay."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


class Room:
    """Memory on the host for tables that follow one another: what one leaves serves the next, and the system need not
    find and wipe it again."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8)

    def table(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An empty one; the one before it is lost."""
        size = prod(shape) * dtype.itemsize
        if len(self._held) < size:
            self._held = torch.empty(0, dtype=torch.uint8)  # never both
            self._held = torch.empty(size, dtype=torch.uint8)
        return self._held[:size].view(dtype).reshape(shape)


class Rows:
    """A table of ``width`` numbers a row, in memory for about so many ``rows``: that of a ``room``, or its own. More is
    taken where more come."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, room: Room | None = None):
        self._array = (room or Room()).table(rows, width, dtype=dtype)
        self._count = 0

    def add(self, piece: Tensor) -> None:
        begin, end = self._count, self._count + len(piece)
        if end > len(self._array):
            more = self._array.new_empty(2 * end, piece.shape[1])
            more[:begin] = self.found
            self._array = more
        self._array[begin:end] = piece
        self._count = end

    @property
    def found(self) -> Tensor:
        """The rows there are."""
        return self._array[: self._count]
