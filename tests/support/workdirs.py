"""Runs with a workdir, and runs that end too early."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor, nn

import leanconv
from leanconv.calibrate.streams import Streams
from leanconv.result import Accelerated
from leanconv.storage.workdir import Workdir
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images


def run(
    folder: Path | None, model: nn.Module | None = None, images: Tensor | None = None, **other: object
) -> Accelerated:
    arguments: dict[str, object] = {"speedup": 2.0, "samples": 2000, "progress": False, "workdir": folder, **other}
    given = plain_network() if model is None else model
    return leanconv.accelerate(given, smooth_images(24) if images is None else images, **arguments)  # type: ignore[arg-type]


class Killed(BaseException):
    pass


def ended_after(
    times: int, kind: type, method: str, monkeypatch: pytest.MonkeyPatch, begun: Callable[[], object]
) -> None:
    """What was ``begun`` ends right after so many calls of a method."""
    usual, count = getattr(kind, method), 0

    def counted(self: object, *given: object) -> None:
        nonlocal count
        usual(self, *given)
        count += 1
        if count == times:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(kind, method, counted)
        with pytest.raises(Killed):
            begun()


def killed_after(sites: int, monkeypatch: pytest.MonkeyPatch, folder: Path, **other: object) -> None:
    """A run that ends right after so many sites were solved."""
    ended_after(sites, Workdir, "keep_solved", monkeypatch, lambda: run(folder, **other))


def original_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Streams.responses

    def guarded(self: Streams, network: nn.Module, probes: object, title: str, *more: object) -> object:
        assert title != "original network"
        return usual(self, network, probes, title, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Streams, "responses", guarded)
