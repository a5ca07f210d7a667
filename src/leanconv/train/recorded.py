"""Steps of training as CUDA graphs: a step of a small network is a thousand launches, which take Python longer than the
GPU takes for the work. Recorded once, they are two.

What is recorded does what the first step did, whatever the network's Python would do by now. So a network is recorded
only if a step of it neither waits for the GPU nor draws random numbers there, and if what was recorded finds the loss
that running it finds, on images it was not recorded with.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

log = logging.getLogger("leanconv")

# Steps that are run as they are: optimizers have made their state by then, and cuDNN has chosen its kernels.
BEFORE = 3
# Recorded and run, a loss may differ by so much: half precision, sums in another order.
ALIKE = 1e-2
# Memory there must be, in steps: a recording keeps its own, and is compared with a step beside it.
ROOM = 2.25


class Steps:
    """Steps of training, one after the other: ``gradients`` of a batch of images (and its loss), then ``move``."""

    def __init__(self, gradients: Callable[[Tensor], Tensor], move: Callable[[], None]):
        self._gradients, self._move = gradients, move
        self._done = 0
        self._sample: Tensor | None = None  # what is recorded with
        self._recording: _Recording | None = None
        self._refused = False

    def __call__(self, images: Tensor) -> Tensor:
        """The loss of the step, which lies there until the next."""
        self._done += 1
        if self._recording is not None and self._recording.fits(images):
            return self._recording.step(images)
        if self._done == BEFORE:
            return self._looked_at(images)
        if self._done == BEFORE + 1 and not self._refused:
            return self._recorded(images)
        return self._plain(images)

    def _plain(self, images: Tensor) -> Tensor:
        loss = self._gradients(images)
        self._move()
        return loss

    def _refuse(self, reason: str) -> None:
        self._refused, self._recording = True, None
        log.info("steps are not recorded as a CUDA graph: %s", reason)

    def _looked_at(self, images: Tensor) -> Tensor:
        """A step as it is, of which is noted whether it can be recorded."""
        generator = torch.cuda.default_generators[images.device.index]
        drawn = generator.get_offset()
        try:
            with _no_waiting():
                loss = self._gradients(images)
        except Exception as error:  # whatever a network's own code makes of it
            self._refuse(f"the network waits for the GPU ({type(error).__name__})")
            return self._plain(images)  # where it was another error, it comes again
        if generator.get_offset() != drawn:
            self._refuse("the network draws random numbers")
        if ROOM * _taken(images.device) > _free(images.device):
            self._refuse("there is not memory enough")
        self._move()
        self._sample = None if self._refused else images.clone()
        return loss

    def _recorded(self, images: Tensor) -> Tensor:
        """Record, and believe it only if it agrees with the step as it is."""
        sample, self._sample = self._sample, None
        assert sample is not None
        generator = torch.cuda.default_generators[images.device.index]
        whole = generator.clone_state()
        try:
            recording = _Recording(self._gradients, self._move, sample)
        except Exception as error:  # whatever a network's own code makes of it
            # A recording that was broken off leaves the generator as if it went on.
            generator.graphsafe_set_state(whole)
            self._refuse((str(error) or type(error).__name__).splitlines()[0])
            return self._plain(images)  # where it was another error, it comes again
        if not recording.fits(images):
            return self._plain(images)
        found, wanted = recording.gradients(images).clone(), self._gradients(images)
        if not torch.allclose(found, wanted, rtol=ALIKE, equal_nan=True):
            self._refuse(f"recorded, the loss was {float(found):g} where it is {float(wanted):g}")
            self._move()
            return wanted
        self._recording = recording
        return recording.step(images)


class _Recording:
    """Both parts of a step; tensors made while recording stay where they are, and are written anew every time."""

    def __init__(self, gradients: Callable[[Tensor], Tensor], move: Callable[[], None], images: Tensor):
        self._images = images
        self._parts = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        memory = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(self._parts[0], memory, capture_error_mode="thread_local"):
            self._loss = gradients(images)
        with torch.cuda.graph(self._parts[1], memory, capture_error_mode="thread_local"):
            move()

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


def _taken(device: torch.device) -> int:
    """Bytes that a step takes, or more: the most that was ever taken beyond what is now."""
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


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
