"""The processes of one job, through torch.distributed: images are shared out, one process solves.

Every exchange begins with a word from each process whether it is well, so that an error in one ends all.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from leanconv.calibrate.probes import Responses
from leanconv.calibrate.samples import Piece
from leanconv.errors import LeanconvError

T = TypeVar("T")


class Team:
    """This process and its fellows; alone without an initialised process group."""

    def __init__(self, device: torch.device):
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.world = dist.get_world_size() if together else 1
        # NCCL moves what is on the GPU, gloo what is not.
        on_gpu = together and "nccl" in dist.get_backend()
        self._home = device
        self._device = device if on_gpu and device.type == "cuda" else torch.device("cpu")

    @property
    def lead(self) -> bool:
        """Whether this process solves."""
        return self.rank == 0

    def same(self, what: str, value: T) -> None:
        """Refuse to go on where processes were given different things."""
        values = self.words(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise LeanconvError(
                    f"process {rank} was given other {what} than process 0 ({other} against {values[0]}); give every "
                    "process the same, they share the work out."
                )

    def share(self, value: T | None) -> T:
        """The lead's ``value``, everywhere."""
        if self.world > 1:
            self._exchange_health(None)
            # Saved as bytes: a tensor then arrives on this process's device, not on one named like the lead's.
            # Plans and fits are classes of ours; torch.distributed pickles between the processes of a job anyway.
            held = io.BytesIO()
            if self.lead:
                torch.save(value, held)
            box: list[Any] = [held.getvalue()]
            dist.broadcast_object_list(box, 0, device=self._device)
            if not self.lead:
                value = torch.load(io.BytesIO(box[0]), map_location=self._home, weights_only=False)
        return value  # type: ignore[return-value]

    def gather(self, pieces: list[Piece]) -> list[Piece]:
        """Everybody's pieces in the order of the images, at the lead; nothing elsewhere."""
        if self.world == 1:
            return pieces
        self._exchange_health(None)
        # An addend need not be as wide as what it is added behind: halfway, that is not the response yet.
        facts = [
            (first, found.y.dtype, found.y.shape, None if found.addend is None else found.addend.shape)
            for first, found in pieces
        ]
        known: list[Any] = [None] * self.world
        dist.all_gather_object(known, facts)
        if not self.lead:
            for _, found in pieces:
                for tensor in (found.y, found.addend):
                    if tensor is not None:
                        dist.send(tensor.contiguous().to(self._device), 0)
            return []
        everybody = list(pieces)
        for rank in range(1, self.world):
            for first, dtype, shape, addend in known[rank]:
                y = self._receive(shape, dtype, rank)
                added = None if addend is None else self._receive(addend, dtype, rank)
                everybody.append((first, Responses(y, added)))
        return sorted(everybody, key=lambda piece: piece[0])

    def _receive(self, shape: Any, dtype: torch.dtype, rank: int) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(tensor, rank)
        return tensor.to(self._home)

    def words(self, value: T) -> list[T]:
        """Everybody's small ``value``, everywhere, in the order of ranks."""
        if self.world == 1:
            return [value]
        self._exchange_health(None)
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    @contextlib.contextmanager
    def ending_all(self) -> Iterator[None]:
        """An error of one process inside the block ends all, with its message."""
        try:
            yield
            self.words("done")  # who fails up to here ends all
        except Failed:
            raise
        except BaseException as error:
            message = " ".join(str(error).split())[:300] or type(error).__name__
            if self.world > 1:  # the others wait for this process in their next exchange
                with contextlib.suppress(Exception):
                    self._exchange_health(message)
            raise

    def _exchange_health(self, trouble: str | None) -> None:
        """Before every exchange: a process that fails tells the others, who end, too."""
        found: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(found, trouble)
        except Exception as error:
            raise LeanconvError(
                f"another process of the job ended ({type(error).__name__}); start it again, with the same workdir to "
                "go on where it stopped."
            ) from error
        for rank, said in enumerate(found):
            if said is not None and trouble is None:
                raise Failed(f"process {rank} of the job failed: {said}")


class Failed(LeanconvError):
    """Another process failed and has said so; it waits for no answer."""
