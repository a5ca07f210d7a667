"""Images on a GPU: on their way there while Python is at other work, and kept there for the second stream.

In: batches as they were given, and how many bytes of the device they may take. Out: copies on the device that a network
may write to. A network is looked at in Python, and a GPU's driver copies ordinary memory at a few gigabytes a second:
one after the other the two take as long as a pass. So images that are there already set out before the network is
looked at, on a thread and a stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leanconv.calibrate.batches import Batch, Batches, log, to_device
from leanconv.calibrate.memory import Memory
from leanconv.network.function_trace import tensors

# Images set out within this share of what may be kept on the device, and later ones are kept there if they take no more
# of what is left then: frontiers want room, too.
SHARE = 0.5
# Bytes of an image's way through memory that the device reads by itself. The system has not much of that to give.
STAGE = 32 << 20

Key = tuple[int, int]  # number of the first image of a piece, images


@dataclass
class _Travelled:
    """Where a piece has come to, and the moment its numbers are all there."""

    tensor: Tensor
    there: torch.cuda.Event


class Travel:
    """Pieces of batches that were sent to the device, by their places among the images."""

    def __init__(self, device: torch.device):
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leanconv-images")
        self._sent: dict[Key, tuple[Future[_Travelled], int]] = {}

    @property
    def bytes(self) -> int:
        """On the device, or on their way."""
        return sum(size for _, size in self._sent.values())

    def send(self, batches: Batches, room: int) -> None:
        """Those at hand, the first ones, as far as they fit into ``room`` bytes of the device."""
        if self._device.type != "cuda":
            return
        stream = torch.cuda.Stream(self._device)
        for batch in batches.at_hand():
            for key, piece in pieces_of(batch):
                if not isinstance(piece, Tensor) or piece.device.type != "cpu":
                    return
                room -= piece.nbytes
                if room < 0:
                    return
                self._sent[key] = self._thread.submit(_carried, piece, self._device, stream), piece.nbytes

    def take(self, key: Key) -> Tensor | None:
        """A piece that was sent, once: waits until it is there. None if it was not, or did not arrive."""
        sent = self._sent.pop(key, None)
        if sent is None:
            return None
        try:
            found = sent[0].result()
        except Exception as error:
            # The device has no room, or the system no memory to stage in. The ordinary way says so if it is worse.
            log.debug("images did not travel ahead: %s", error)
            self.end()
            return None
        now = torch.cuda.current_stream(self._device)
        now.wait_event(found.there)
        found.tensor.record_stream(now)
        return found.tensor

    def end(self) -> None:
        """Send no more, and forget what nobody took."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._sent.clear()


@contextmanager
def travelling(device: torch.device) -> Iterator[Travel]:
    """Whatever happens inside the block, nothing is on its way behind it."""
    travel = Travel(device)
    try:
        yield travel
    finally:
        travel.end()


def _carried(piece: Tensor, device: torch.device, stream: torch.cuda.Stream) -> _Travelled:
    """By way of memory the device reads by itself, where it is contiguous: the driver's own way there stops what Python
    asks for meanwhile."""
    with torch.cuda.stream(stream):
        moved = torch.empty_like(piece, device=device, requires_grad=False)
        staged_copy(piece, moved, lambda count: torch.empty(count, dtype=piece.dtype, pin_memory=True))
        return _Travelled(moved, stream.record_event())


def staged_copy(piece: Tensor, moved: Tensor, stage: Callable[[int], Tensor]) -> None:
    """``piece`` into ``moved``, part by part through what ``stage`` gives for so many numbers."""
    piece = piece.detach()
    if not piece.is_contiguous():
        moved.copy_(piece)
        return
    source, goal, most = piece.view(-1), moved.view(-1), max(1, STAGE // piece.element_size())
    for begin in range(0, len(source), most):
        part = source[begin : begin + most]
        staged = stage(len(part))
        # One thread is enough: torch's copy would take all cores from whoever looks at the network.
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
        """A copy that may be written to."""
        device = self._memory.device
        if device.type != "cuda":
            return batch.on(device)
        there = tuple(self._there(key, piece) for key, piece in pieces_of(batch))
        return replace(batch, pieces=there).on(device)

    def _there(self, key: Key, piece: Any) -> Any:
        if key in self._kept:
            return self._kept[key]
        if all(tensor.device == self._memory.device for tensor in tensors(piece)):
            return piece
        sent = self._travel.bytes
        found = self._travel.take(key)
        if found is None:
            if sent > self._travel.bytes:  # what did not arrive takes no room
                self._memory.release("device", sent - self._travel.bytes)
            found = self._moved(piece)
            if not self._keeps or self._memory.reserve(_bytes(found), share=SHARE, among=("device",)) is None:
                return found
        self._kept[key] = found
        return found

    def _moved(self, piece: Any) -> Any:
        """On a stream of its own: images travel while the network is still at work on the ones before."""
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
        """They are not needed any more."""
        for key, _ in pieces_of(batch):
            kept = self._kept.pop(key, None)
            if kept is not None:
                self._memory.release("device", _bytes(kept))

    def drop_all(self) -> bool:
        """The device is short of memory: keep none any more. Whether there were some."""
        kept = self._travel.bytes + sum(map(_bytes, self._kept.values()))
        if kept:
            self._memory.release("device", kept)
        self._travel.end()
        self._kept.clear()
        self._keeps = False
        return kept > 0


def pieces_of(batch: Batch) -> Iterator[tuple[Key, Any]]:
    first = batch.first
    for piece in batch.pieces:
        size = batch.size if len(batch.pieces) == 1 else len(piece)
        yield (first, size), piece
        first += size


def _bytes(inputs: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors(inputs))
