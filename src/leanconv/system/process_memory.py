"""Free memory of the process: Python's garbage collector and the C library's heap (glibc; others need no settings).

While images go through a network, memory of freed tensors stays in the process; scattered memory goes back to the
system."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator

# glibc's names for what mallopt sets.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

# glibc's own values after a process has used large tensors, bytes: blocks from 32 MB on come from the system and go
# back at once, and so do 64 MB that are free at the end of the heap.
_LARGE, _FREE = 32 << 20, 64 << 20

# While a network runs: its layers free more than that and need it again at once, and new pages are slow (the system
# wipes each first).
AT_HAND = 256 << 20


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """No automatic garbage collection inside the block: looking through all objects takes a tenth of a second with a
    few libraries loaded. ``gc.collect(1)`` still looks at young ones."""
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
        yield  # the user has set it
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
    """Return free memory that is scattered over the heap to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
