"""What times depend on beside the network: the machine, its threads, the versions of the libraries."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from leanconv.runtimes.runners import RUNTIMES
from leanconv.system.threads import cores


def machine(device: torch.device, threads: int) -> dict[str, Any]:
    """The machine as it is now, as plain data."""
    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": cores(),
        "threads": threads,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for library in dict.fromkeys(library for runner in RUNTIMES.values() for library in runner.libraries):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[library] = importlib.metadata.version(library)
    return facts


def cpu_name() -> str:
    """The maker's name of it, where the system knows that."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def threads_set(count: int | None) -> Iterator[int]:
    """Inside the block torch computes with ``count`` threads; afterwards with as many as before."""
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
