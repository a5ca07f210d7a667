"""Calibration reads images that are decoded while they are used, and knows no reader of files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from leanconv.calibrate.batches import ImageSource, take
from leanconv.images import Pictures, Preprocess
from tests.support.pictures import smooth_images


class Decoded:
    """Images in batches of four, of which number 5 cannot be read."""

    images = 12

    def __iter__(self) -> Iterator[Tensor]:
        return (batch for _, batch in self.placed_batches())

    def placed_batches(self, rank: int = 0, world: int = 1) -> Iterator[tuple[int, Tensor]]:
        pictures = smooth_images(12)
        for first in range(4 * rank, 12, 4 * world):
            chosen = [number for number in range(first, first + 4) if number != 5]
            yield first, pictures[chosen]


def test_a_source_places_its_batches_by_itself() -> None:
    assert isinstance(Decoded(), ImageSource)
    assert isinstance(Pictures([], Preprocess()), ImageSource)
    assert not isinstance([smooth_images(2)], ImageSource)
    for rank, world, firsts in ((0, 1, [0, 4, 8]), (0, 2, [0, 8]), (1, 2, [4])):
        batches = take(Decoded(), rank=rank, world=world)
        assert [(batch.first, batch.size) for batch in batches] == [(first, 3 if first == 4 else 4) for first in firsts]
        assert batches.images == 12
    (_, second, _) = take(Decoded())
    assert torch.equal(second.on(torch.device("cpu")), smooth_images(12)[[4, 6, 7]])


def test_calibration_imports_no_reader_of_files() -> None:
    script = "import sys, leanconv.calibrate.batches, leanconv.calibrate.streaming.passes\n"
    script += "assert not [name for name in sys.modules if name.startswith('leanconv.images')]"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
