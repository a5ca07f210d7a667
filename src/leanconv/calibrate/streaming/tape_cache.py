"""The tapes of a run: which of them serves which batch."""

from __future__ import annotations

from typing import Any

from leanconv.calibrate.batches import Batch
from leanconv.calibrate.streaming.tape import Tape


class Tapes:
    """Tapes by the kind of batch they serve."""

    def __init__(self, any_size: Tape | None = None, batch: Batch | None = None):
        """With a tape that serves batches of any size, and the ``batch`` it is of."""
        self._tapes: dict[Any, Tape] = {}
        self._any_size: Any = None
        if any_size is not None and batch is not None:
            self._any_size = _but_for_size(batch)
            self._tapes[self._any_size] = any_size

    def key(self, batch: Batch) -> Any:
        alike = _but_for_size(batch)
        return alike if alike == self._any_size else batch.kind

    def get(self, batch: Batch) -> Tape | None:
        return self._tapes.get(self.key(batch))

    def add(self, batch: Batch, tape: Tape) -> None:
        self._tapes[self.key(batch)] = tape


def _but_for_size(batch: Batch) -> Any:
    """The kind of a batch of any number of images."""
    return tuple((shape[1:], stride[1:], dtype) for shape, stride, dtype in batch.kind)
