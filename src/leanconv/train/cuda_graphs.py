"""Training steps as CUDA graphs: a step of a small network is a thousand kernel launches, for which Python takes longer
than the GPU for the work. Recorded once, they are two.

A recording repeats the first step, whatever the network's Python code would do by now. So a network is recorded only if
its step neither waits for the GPU nor draws random numbers, and if the recording gives the same loss as running the
step, on images it was not recorded with.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger("leanconv")

# Steps before recording: by then the optimizers have made their state, and cuDNN has chosen its kernels.
BEFORE = 3
# Relative difference allowed between the recorded loss and that of running: half precision, sums in another order.
TOLERANCE = 1e-2
# Free memory needed, as a multiple of what a step takes: a recording has memory of its own.
ROOM = 1.25


class Steps:
    """Training steps, one after the other: ``gradients`` of a batch of images (returns its loss), then ``move``."""

    def __init__(self, gradients: Callable[[Tensor], Tensor], move: Callable[[], None]):
        self._gradients, self._move = gradients, move
        self._count = 0
        self._sample: Tensor | None = None  # images to record with, once a step can be recorded
        self._recording: _Recording | None = None

    def __call__(self, images: Tensor) -> Tensor:
        """The loss of the step. The next step writes over it."""
        self._count += 1
        if self._recording is not None and self._recording.fits(images):
            return self._recording.step(images)
        if self._count == BEFORE:
            return self._examine(images)
        sample, self._sample = self._sample, None
        return self._run(images) if sample is None else self._record(images, sample)

    def _run(self, images: Tensor) -> Tensor:
        loss = self._gradients(images)
        self._move()
        return loss

    def _examine(self, images: Tensor) -> Tensor:
        """Run a step, and see whether it can be recorded."""
        device = images.device
        random_state, allocated = _random_state(device), _allocated(device)
        try:
            with _no_waiting():
                loss = self._gradients(images)
        except Exception as error:  # the network's own code can raise anything
            _log(f"the network cannot run without waiting for the GPU ({_reason(error)})")
            return self._run(images)  # an error of another kind comes again here
        if _random_state(device) != random_state:
            _log("the network draws random numbers")
        elif not _has_room(device, allocated):
            _log("there is not memory enough")
        else:
            self._sample = images.clone()
        self._move()
        return loss

    def _record(self, images: Tensor, sample: Tensor) -> Tensor:
        """Record, and use the recording only if it agrees with running the step."""
        expected = self._gradients(images)
        generator = torch.cuda.default_generators[images.device.index]
        state, stream = generator.clone_state(), torch.cuda.current_stream(images.device)
        try:
            recording = _Recording(self._gradients, self._move, sample)
        except BaseException as error:  # the network's own code can raise anything
            # A broken recording leaves the generator in recording mode, and may leave its stream current.
            torch.cuda.set_stream(stream)
            generator.graphsafe_set_state(state)
            if not isinstance(error, Exception):
                raise
            _log(_reason(error))
            return self._run(images)  # an error of another kind comes again here
        if not recording.fits(images):
            _log("batches are not of one shape")
            return self._run(images)
        loss = recording.gradients(images)
        if not torch.allclose(loss, expected, rtol=TOLERANCE):
            _log(f"recorded, the loss was {float(loss):g} where it is {float(expected):g}")
            return self._run(images)
        self._recording = recording
        return recording.step(images)


class _Recording:
    """Both parts of a step. Tensors made while recording stay where they are; every replay writes them anew."""

    def __init__(self, gradients: Callable[[Tensor], Tensor], move: Callable[[], None], images: Tensor):
        self._images = images
        self._graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # torch's own stream for recording is on the device that was current at its first use, which may be another:
        # the work would be done at once, and an empty graph recorded.
        stream = torch.cuda.Stream(images.device)
        options: dict[str, Any] = {"pool": torch.cuda.graph_pool_handle(), "capture_error_mode": "thread_local"}
        with torch.cuda.device(images.device):
            with torch.cuda.graph(self._graphs[0], stream=stream, **options):
                self._loss = gradients(images)
            with torch.cuda.graph(self._graphs[1], stream=stream, **options):
                move()
        self._loss.fill_(torch.nan)  # so that a graph which does nothing is noticed

    def fits(self, images: Tensor) -> bool:
        mine = self._images
        return (images.shape, images.dtype, images.stride()) == (mine.shape, mine.dtype, mine.stride())

    def gradients(self, images: Tensor) -> Tensor:
        self._images.copy_(images)
        self._graphs[0].replay()
        return self._loss

    def step(self, images: Tensor) -> Tensor:
        loss = self.gradients(images)
        self._graphs[1].replay()
        return loss


def _log(reason: str) -> None:
    log.info("steps are not recorded as a CUDA graph: %s", reason)


def _reason(error: BaseException) -> str:
    """The first line of the network's own message, where ours was made from it."""
    cause = error.__cause__ or error
    return (str(cause) or type(cause).__name__).splitlines()[0]


def _random_state(device: torch.device) -> Any:
    """Changes when random numbers of any kind are drawn."""
    numpy: Any = np.random.get_state()
    return (
        torch.cuda.default_generators[device.index].get_offset(),
        torch.get_rng_state().tolist(),
        random.getstate(),
        (numpy[1].tolist(), *numpy[2:]),
    )


def _allocated(device: torch.device) -> int:
    """Bytes in use; the peak is counted from here on."""
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _has_room(device: torch.device, before: int) -> bool:
    """Whether there is memory for a recording of what was done since ``before`` bytes were in use."""
    taken = torch.cuda.max_memory_allocated(device) - before
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch gives these out again
    return ROOM * taken <= torch.cuda.mem_get_info(device)[0] + cached


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Inside the block, waiting for the GPU is an error."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not see every wait: recording sees the others
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
