"""The command line in this process."""

from __future__ import annotations

import sys

import pytest

from leanconv.cli.main import run

NETWORK = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(),
        nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 2),
    )

def grey():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))

def broken():
    raise RuntimeError("no such luck")

def text():
    return "network"
"""

COMMON = "--size 16 --workers 0 --device cpu"
ACCELERATE = f"accelerate net.py:build --images photos --speedup 2 --samples 500 {COMMON}"


def call(arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code of ``leanconv ARGUMENTS``, what it printed, and its errors."""
    monkeypatch.setattr(sys, "argv", ["leanconv", *arguments.split()])
    with pytest.raises(SystemExit) as caught:
        run()
    code = caught.value.code
    captured = capsys.readouterr()
    return 0 if code is None else int(code), captured.out, captured.err
