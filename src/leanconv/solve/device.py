"""What a GPU is spared: products more exact than they need be, and waiting for numbers to be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Number:
    """A number on its way from a device. Reading it waits for what the device was asked before it, not since."""

    def __init__(self, value: Tensor):
        self._event: torch.cuda.Event | None = None
        self._value = value
        if value.device.type == "cuda":
            self._value = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(value.device))

    def read(self) -> float:
        if self._event is not None:
            self._event.synchronize()
        return float(self._value)


@contextmanager
def quick_products(device: torch.device) -> Iterator[None]:
    """A GPU's float32 matrix products in TF32, ten bits of mantissa and several times faster.

    For the inner loop of the solver only: what is measured and what is inverted is computed exactly.
    """
    if device.type != "cuda":
        yield
        return
    # torch refuses its older names once a program has used the newer one; torch 2.8 has only the older.
    flags = torch.backends.cuda.matmul
    name, quick = ("fp32_precision", "tf32") if hasattr(flags, "fp32_precision") else ("allow_tf32", True)
    before = getattr(flags, name)
    setattr(flags, name, quick)
    try:
        yield
    finally:
        setattr(flags, name, before)
