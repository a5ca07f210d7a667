"""Fixtures that the tests of several rooms share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import leanconv
from tests.support.command import NETWORK, call
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images, write_picture
from tests.support.scenes import scenes  # noqa: F401

torch.set_num_threads(1)


@pytest.fixture
def network() -> nn.Module:
    return plain_network()


@pytest.fixture
def pictures() -> Tensor:
    return smooth_images()


@pytest.fixture(scope="module")
def accelerated() -> leanconv.Accelerated:
    return leanconv.accelerate(plain_network(), smooth_images(24), 2.0, samples=1000, progress=False)


@pytest.fixture
def leanconv_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, str, str]]:
    """``leanconv ARGUMENTS`` in this process: its exit code, what it printed, and its errors."""
    return lambda arguments: call(arguments, monkeypatch, capsys)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a network in net.py and eight photos in photos/."""
    (tmp_path / "net.py").write_text(NETWORK)
    for label in ("cat", "dog"):
        for number in range(4):
            write_picture(tmp_path / "photos" / label / f"{number}.png", 30 + 60 * number)
    monkeypatch.chdir(tmp_path)
    return tmp_path
