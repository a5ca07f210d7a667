"""A number of a GPU, read without waiting for what it does next."""

from __future__ import annotations

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
