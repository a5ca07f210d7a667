"""Images on a GPU: sent there while Python is at other work, and kept there for the second pass.

Python takes time to look at a network, and a GPU's driver copies ordinary memory at a few gigabytes a second: one after
the other they take as long as a pass. So images that have been read are sent before the network is looked at, on a
thread and a CUDA stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leanconv.calibrate.batches import Batch, Batches, log, to_device
from leanconv.calibrate.memory import Memory
from leanconv.network.function_trace import tensors

# Images are sent within this share of the memory that may be kept on the device, and later ones are kept there if they
# take no more than this of what is left then: frontiers need memory too.
SHARE = 0.5
# Bytes of pinned memory an image is copied through. The system has not much of it.
STAGE = 32 << 20

Key = tuple[int, int]  # of a batch


class Travel:
    """Pieces of batches that were sent to the device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leanconv-images")
        self._sent: dict[Key, tuple[Future[tuple[Tensor, torch.cuda.Event]], int]] = {}

    @property
    def bytes(self) -> int:
        """On the device, or on their way."""
        return sum(size for _, size in self._sent.values())

    def send(self, batches: Batches, room: int) -> None:
        """The first of those that have been read, as many as fit into ``room`` bytes of the device."""
        if self._device.type != "cuda":
            return
        stream = torch.cuda.Stream(self._device)
        for part in (part for batch in batches.at_hand() for part in batch.split()):
            (piece,) = part.pieces
            if not isinstance(piece, Tensor) or piece.device.type != "cpu":
                return
            room -= piece.nbytes
            if room < 0:
                return
            self._sent[part.key] = self._thread.submit(_carried, piece, self._device, stream), piece.nbytes

    def take(self, key: Key) -> Tensor | None:
        """A piece that was sent, once: waits until it is there. None if it was not, or did not arrive."""
        sent = self._sent.pop(key, None)
        if sent is None:
            return None
        try:
            tensor, there = sent[0].result()
        except Exception as error:
            # No memory on the device, or none to pin. If it is worse, the ordinary way will say so.
            log.debug("images could not be sent ahead: %s", error)
            self.end()
            return None
        now = torch.cuda.current_stream(self._device)
        now.wait_event(there)
        tensor.record_stream(now)
        return tensor

    def end(self) -> None:
        """Send no more, and forget what nobody took."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._sent.clear()


@contextmanager
def travelling(device: torch.device) -> Iterator[Travel]:
    """Whatever happens inside the block, nothing is being sent behind it."""
    travel = Travel(device)
    try:
        yield travel
    finally:
        travel.end()


def _carried(piece: Tensor, device: torch.device, stream: torch.cuda.Stream) -> tuple[Tensor, torch.cuda.Event]:
    """A copy on the device, and the event after which it is complete. Through pinned memory, if the piece is
    contiguous: the driver's own way would block what Python asks for meanwhile."""
    with torch.cuda.stream(stream):
        moved = torch.empty_like(piece, device=device, requires_grad=False)
        staged_copy(piece, moved, lambda count: torch.empty(count, dtype=piece.dtype, pin_memory=True))
        return moved, stream.record_event()


def staged_copy(piece: Tensor, moved: Tensor, stage: Callable[[int], Tensor]) -> None:
    """``piece`` into ``moved``, part by part through memory that ``stage`` gives for so many numbers."""
    piece = piece.detach()
    if not piece.is_contiguous():
        moved.copy_(piece)
        return
    source, goal, most = piece.view(-1), moved.view(-1), max(1, STAGE // piece.element_size())
    for begin in range(0, len(source), most):
        part = source[begin : begin + most]
        staged = stage(len(part))
        # On one thread: torch's copy would take all cores from the code that looks at the network.
        np.copyto(staged.view(torch.uint8).numpy(), part.view(torch.uint8).numpy())
        goal[begin : begin + most].copy_(staged, non_blocking=True)


class Inputs:
    """Batches on the device, kept there from the first stream for the second where there is room."""

    def __init__(self, memory: Memory, travel: Travel):
        self._memory, self._travel = memory, travel
        self._kept: dict[Key, Any] = {}
        self._keeps = True
        if travel.bytes:
            memory.take_back("device", travel.bytes)

    def get(self, batch: Batch) -> Any:
        """The batch on the device: a copy that may be written to."""
        device = self._memory.device
        if device.type != "cuda":
            return batch.on(device)
        pieces = tuple(self._there(part.key, part.pieces[0]) for part in batch.split())
        return replace(batch, pieces=pieces).on(device)

    def _there(self, key: Key, piece: Any) -> Any:
        """A piece on the device, which must not be written to."""
        if key in self._kept:
            return self._kept[key]
        if all(tensor.device == self._memory.device for tensor in tensors(piece)):
            return piece
        sent = self._travel.bytes
        copy: Any = self._travel.take(key)
        if copy is None:
            if sent > self._travel.bytes:  # what did not arrive takes no memory
                self._memory.release("device", sent - self._travel.bytes)
            copy = self._moved(piece)
            if not self._keeps or self._memory.reserve(_bytes(copy), share=SHARE, among=("device",)) is None:
                return copy
        self._kept[key] = copy
        return copy

    def _moved(self, piece: Any) -> Any:
        """On a stream of its own: images are copied while the network still works on the ones before."""
        now = torch.cuda.current_stream(self._memory.device)
        with torch.cuda.stream(self._lane):
            moved = to_device(piece, self._memory.device)
        now.wait_stream(self._lane)
        for tensor in tensors(moved):
            tensor.record_stream(now)
        return moved

    @cached_property
    def _lane(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._memory.device)

    def drop(self, batch: Batch) -> None:
        """It is not needed any more."""
        for part in batch.split():
            if part.key in self._kept:
                self._memory.release("device", _bytes(self._kept.pop(part.key)))

    def drop_all(self) -> bool:
        """The device is short of memory: keep none any more. Returns whether there were some."""
        kept = self._travel.bytes + sum(map(_bytes, self._kept.values()))
        if kept:
            self._memory.release("device", kept)
        self._travel.end()
        self._kept.clear()
        self._keeps = False
        return kept > 0


def _bytes(inputs: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors(inputs))
