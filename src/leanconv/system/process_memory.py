"""What the process does with memory that is free: Python's garbage collector and the C library's heap.

Memory the network's tensors leave behind stays in the process while images go through, and goes back to the system when
it is scattered. Only glibc does otherwise by itself, and only glibc is told."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator

# glibc's names for what mallopt sets.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

# What glibc comes to by itself in a process that has used large tensors: those of 32 MB and more are the system's own,
# and go back to it at once; 64 MB that are free at the heap's end do too.
_LARGE, _FREE = 32 << 20, 64 << 20

# While a network runs: its layers leave more than that, and want it again at once. The system gives memory page by
# page, each wiped first.
AT_HAND = 256 << 20


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """Python's garbage collector looks through all objects there are every now and then, a tenth of a second with a
    few libraries loaded. Inside the block it looks at new ones only, and only when asked (``gc.collect(1)``)."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


@contextlib.contextmanager
def heap_at_hand() -> Iterator[None]:
    """Inside the block up to ``AT_HAND`` bytes of free memory stay in the process."""
    if any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")):
        yield  # somebody has thought about it
        return
    _set(AT_HAND)
    try:
        yield
    finally:
        _set(_FREE)
        give_back()


def _set(free: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_TRIM_THRESHOLD, free)


def give_back() -> None:
    """Hand memory that is free but scattered over the heap back to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
