"""Random numbers from a seed, inside a block."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(seed: int, *devices: torch.device) -> Iterator[None]:
    """Random numbers from ``seed`` inside the block: Python's, NumPy's and torch's on the CPU and these devices.
    Afterwards all of them continue as if the block had not run."""
    python, numpy = random.getstate(), np.random.get_state()
    gpus = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=gpus):
        # Not torch.manual_seed: it would also set the seed CUDA starts with, if it has not started yet.
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            torch.cuda.default_generators[gpu.index].manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def untouched_rng(seed: int) -> Iterator[None]:
    """``seeded`` on every device in use. Loaders draw from all generators; some networks draw in eval mode."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    with seeded(seed, *(torch.device("cuda", index) for index in range(count))):
        yield
