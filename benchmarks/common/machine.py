"""What a measurement was made on."""

from __future__ import annotations

import platform
import subprocess

import torch

from benchmarks.common.results import ROOT


def machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"{platform.machine()} CPU"
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def commit() -> str:
    """The commit that is checked out here, with "-dirty" where files differ from it."""
    try:
        words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
