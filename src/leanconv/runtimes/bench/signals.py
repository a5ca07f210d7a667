"""The stack on which a thread's signals are handled, put back after a library that replaces it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class _Stack(ctypes.Structure):
    """``stack_t`` of signal.h, as Linux has it."""

    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def same_signal_stack() -> Iterator[None]:
    """Put the calling thread's signal stack back.

    OpenVINO's compiled network sets one of its own and, when it is deleted, the one it found. Of two networks that are
    deleted in the order they were made, the second thus leaves the first's, whose memory is gone: the next signal, such
    as a data loader's worker ending, kills the process.
    """
    if sys.platform != "linux":
        yield
        return
    change = ctypes.CDLL(None).sigaltstack
    found = _Stack()
    known = change(None, ctypes.byref(found)) == 0
    try:
        yield
    finally:
        if known:
            change(ctypes.byref(found), None)
