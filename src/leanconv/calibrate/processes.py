"""The processes of one job, through torch.distributed: images are shared out, one process solves.

Before every exchange each process says whether it has failed, so that an error in one ends all.
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


class Processes:
    """This process and the others of its job; alone without an initialised process group."""

    def __init__(self, device: torch.device):
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.world = dist.get_world_size() if together else 1
        # NCCL moves what is on the GPU, gloo what is not.
        on_gpu = together and "nccl" in dist.get_backend()
        self._home = device
        self._device = device if on_gpu and device.type == "cuda" else torch.device("cpu")

    @property
    def is_main(self) -> bool:
        """Whether this process solves."""
        return self.rank == 0

    def check_equal(self, what: str, value: T) -> None:
        """Refuse to go on where processes were given different things."""
        values = self.all_gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise LeanconvError(
                    f"process {rank} was given other {what} than process 0 ({other} against {values[0]}); give every "
                    "process the same, they share the work out."
                )

    def broadcast(self, value: T | None) -> T:
        """The main process's ``value``, everywhere."""
        if self.world > 1:
            self._exchange_health(None)
            # Saved as bytes: a tensor then arrives on this process's device, not on one named like the main process's.
            # Plans and fits are classes of ours; torch.distributed pickles between the processes of a job anyway.
            held = io.BytesIO()
            if self.is_main:
                torch.save(value, held)
            box: list[Any] = [held.getvalue()]
            dist.broadcast_object_list(box, 0, device=self._device)
            if not self.is_main:
                value = torch.load(io.BytesIO(box[0]), map_location=self._home, weights_only=False)
        return value  # type: ignore[return-value]

    def gather(self, pieces: list[Piece]) -> list[Piece]:
        """Everybody's pieces in the order of the images, at the main process; nothing elsewhere."""
        if self.world == 1:
            return pieces
        self._exchange_health(None)
        # An addend need not be as wide as ``y``: halfway, that is not the response yet.
        forms = [
            (first, part.y.dtype, part.y.shape, None if part.addend is None else part.addend.shape)
            for first, part in pieces
        ]
        forms_of_all = self._gather_objects(forms)
        if not self.is_main:
            for _, part in pieces:
                for tensor in (part.y, part.addend):
                    if tensor is not None:
                        dist.send(tensor.contiguous().to(self._device), 0)
            return []
        everybody = list(pieces)
        for rank in range(1, self.world):
            for first, dtype, shape, addend_shape in forms_of_all[rank]:
                y = self._receive(shape, dtype, rank)
                addend = None if addend_shape is None else self._receive(addend_shape, dtype, rank)
                everybody.append((first, Responses(y, addend)))
        return sorted(everybody, key=lambda piece: piece[0])

    def _receive(self, shape: Any, dtype: torch.dtype, rank: int) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(tensor, rank)
        return tensor.to(self._home)

    def all_gather(self, value: T) -> list[T]:
        """Everybody's small ``value``, everywhere, in the order of ranks."""
        if self.world == 1:
            return [value]
        self._exchange_health(None)
        return self._gather_objects(value)

    def _gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def ending_together(self) -> Iterator[None]:
        """An error of one process inside the block ends all, with its message."""
        try:
            yield
            self.all_gather("done")  # who fails up to here ends all
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
        try:
            failures = self._gather_objects(trouble)
        except Exception as error:
            raise LeanconvError(
                f"another process of the job ended ({type(error).__name__}); start it again, with the same workdir to "
                "go on where it stopped."
            ) from error
        for rank, failure in enumerate(failures):
            if failure is not None and trouble is None:
                raise Failed(f"process {rank} of the job failed: {failure}")


class Failed(LeanconvError):
    """Another process failed and has said so; it waits for no answer."""
