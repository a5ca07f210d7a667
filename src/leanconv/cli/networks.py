"""A network from MODEL where MODEL may be a saved folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from leanconv.cli import common as given
from leanconv.errors import LeanconvError

if TYPE_CHECKING:
    from torch import nn

    from leanconv.images import Preprocess
    from leanconv.result import Accelerated


@dataclass(frozen=True)
class Opened:
    """A network, the preset of its weights, and the preprocessing a saved folder remembers."""

    model: nn.Module
    preset: str | None = None
    remembered: Preprocess | None = None

    def preprocess(
        self, *, size: int | None, resize: int | None, channels: int | None, mean: str | None, std: str | None
    ) -> Preprocess:
        """What the folder remembers, changed where the user says otherwise."""
        if self.remembered is None or self.remembered.transform is not None:
            return given.preprocess(self.preset, size=size, resize=resize, channels=channels, mean=mean, std=std)
        return given.preprocess(
            None, size=size, resize=resize, channels=channels, mean=mean, std=std, base=self.remembered
        )


def open_network(
    spec: str, original: str | None, weights: str | None, classes: int | None, *, default_weights: str
) -> Opened:
    """``original`` is file.py:callable for a folder whose network leanconv cannot build by name."""
    if not given.is_saved(spec):
        if original is not None:
            raise LeanconvError(f"--model goes with a saved folder, and {spec!r} is none.")
        network = given.load_network(spec, weights, classes, default_weights=default_weights)
        return Opened(network.model, network.preset)
    from leanconv.storage.folder import load_result

    if weights is not None:
        raise LeanconvError("--weights does not go with a saved folder, which has its own.")
    base = None if original is None else given.load_network(original, "none", classes, default_weights="none").model
    return opened(load_result(Path(spec), base))


def opened(result: Accelerated) -> Opened:
    """A saved result's network, and the preprocessing it remembers."""
    from leanconv.images import Preprocess

    if result.preprocess is None:
        return Opened(result.model)
    return Opened(result.model, result.preprocess["preset"], Preprocess.from_json(result.preprocess))
