"""Steps of training as CUDA graphs: a step of a small network is a thousand launches, which take Python longer than the
GPU takes for the work. Recorded once, they are two.

What is recorded does what the first step did, whatever the network's Python would do by now. So a network is recorded
only if a step of it neither waits for the GPU nor draws random numbers, and if what was recorded finds the loss that
running it finds, on images it was not recorded with.
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

# Steps that are run as they are: optimizers have made their state by then, and cuDNN has chosen its kernels.
BEFORE = 3
# Recorded and run, a loss may differ by so much: half precision, sums in another order.
ALIKE = 1e-2
# Memory there must be, in parts of what a step takes: a recording keeps its own.
ROOM = 1.25


class Steps:
    """Steps of training, one after the other: ``gradients`` of a batch of images (and its loss), then ``move``."""

    def __init__(self, gradients: Callable[[Tensor], Tensor], move: Callable[[], None]):
        self._gradients, self._move = gradients, move
        self._done = 0
        self._sample: Tensor | None = None  # what is recorded with; None: nothing is
        self._recording: _Recording | None = None

    def __call__(self, images: Tensor) -> Tensor:
        """The loss of the step, which lies there until the next."""
        self._done += 1
        if self._recording is not None and self._recording.fits(images):
            return self._recording.step(images)
        if self._done == BEFORE:
            return self._looked_at(images)
        sample, self._sample = self._sample, None
        return self._plain(images) if sample is None else self._recorded(images, sample)

    def _plain(self, images: Tensor) -> Tensor:
        loss = self._gradients(images)
        self._move()
        return loss

    def _looked_at(self, images: Tensor) -> Tensor:
        """A step as it is, of which is noted whether it can be recorded."""
        drawn, before = _drawn(images.device), _allocated(images.device)
        try:
            with _no_waiting():
                loss = self._gradients(images)
        except Exception as error:  # whatever a network's own code makes of it
            _say(f"the network cannot run without waiting for the GPU ({_reason(error)})")
            return self._plain(images)  # where it was another error, it comes again
        if _drawn(images.device) != drawn:
            _say("the network draws random numbers")
        elif ROOM * _taken(images.device, before) > _free(images.device):
            _say("there is not memory enough")
        else:
            self._sample = images.clone()
        self._move()
        return loss

    def _recorded(self, images: Tensor, sample: Tensor) -> Tensor:
        """Record, and believe it only if it agrees with the step as it is."""
        expected = self._gradients(images)
        try:
            with _as_before(images.device):
                recording = _Recording(self._gradients, self._move, sample)
        except Exception as error:  # whatever a network's own code makes of it
            _say(_reason(error))
            return self._plain(images)  # where it was another error, it comes again
        if not recording.fits(images):
            _say("batches are not of one shape")
            return self._plain(images)
        loss = recording.gradients(images)
        if not torch.allclose(loss, expected, rtol=ALIKE):
            _say(f"recorded, the loss was {float(loss):g} where it is {float(expected):g}")
            return self._plain(images)
        self._recording = recording
        return recording.step(images)


class _Recording:
    """Both parts of a step; tensors made while recording stay where they are, and are written anew every time."""

    def __init__(self, gradients: Callable[[Tensor], Tensor], move: Callable[[], None], images: Tensor):
        self._images = images
        self._parts = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        memory = torch.cuda.graph_pool_handle()
        # torch's own stream for this is on the device that was current when it was first wanted, which may be another:
        # the work would be done there and then, and an empty graph recorded.
        stream = torch.cuda.Stream(images.device)
        with torch.cuda.device(images.device):
            with torch.cuda.graph(self._parts[0], pool=memory, stream=stream, capture_error_mode="thread_local"):
                self._loss = gradients(images)
            with torch.cuda.graph(self._parts[1], pool=memory, stream=stream, capture_error_mode="thread_local"):
                move()
        self._loss.fill_(torch.nan)  # a graph that does nothing shows

    def fits(self, images: Tensor) -> bool:
        mine = self._images
        return (images.shape, images.dtype, images.stride()) == (mine.shape, mine.dtype, mine.stride())

    def gradients(self, images: Tensor) -> Tensor:
        self._images.copy_(images)
        self._parts[0].replay()
        return self._loss

    def step(self, images: Tensor) -> Tensor:
        loss = self.gradients(images)
        self._parts[1].replay()
        return loss


def _say(reason: str) -> None:
    log.info("steps are not recorded as a CUDA graph: %s", reason)


def _reason(error: Exception) -> str:
    """In the network's own words, where an error of ours was made of them."""
    cause = error.__cause__ or error
    return (str(cause) or type(cause).__name__).splitlines()[0]


def _drawn(device: torch.device) -> Any:
    """Something that is another once random numbers were drawn, of any kind."""
    numpy: Any = np.random.get_state()
    return (
        torch.cuda.default_generators[device.index].get_offset(),
        torch.get_rng_state().tolist(),
        random.getstate(),
        (numpy[1].tolist(), *numpy[2:]),
    )


def _allocated(device: torch.device) -> int:
    """Bytes in use, from which the most that is used is counted anew."""
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _taken(device: torch.device, before: int) -> int:
    """Bytes that were in use at most beyond those ``before``."""
    return torch.cuda.max_memory_allocated(device) - before


def _free(device: torch.device) -> int:
    """Bytes that may be taken, those that torch keeps for later among them."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Whatever would wait for the GPU is an error."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not see everything: recording sees the rest
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _as_before(device: torch.device) -> Iterator[None]:
    """A recording that was broken off leaves the generator as if it went on, and may leave the stream current."""
    generator, stream = torch.cuda.default_generators[device.index], torch.cuda.current_stream(device)
    state = generator.clone_state()
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(state)
        raise
