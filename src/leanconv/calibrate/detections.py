"""A detector's calibration images: what it makes of them, and the boxes it looks at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.errors import LeanconvError
from leanconv.network.detector import tensors_of
from leanconv.network.failure import model_failed
from leanconv.network.survey import survey

# Images the real cost of a detector is counted on: how many boxes it looks at differs from image to image.
COUNTED = 8


class Detections:
    """Batches of ``images`` (lists of 3 x H x W tensors, or with targets behind them) as ``model``, an original
    detector on ``device``, sees them. They can be gone through once."""

    def __init__(self, model: nn.Module, images: Iterable[Any], device: torch.device):
        self._model, self._images, self._device = model, images, device
        self._first: list[Tensor] = []

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self._images:
            pictures = [picture.to(self._device) for picture in _pictures(batch)]
            self._first += pictures[: COUNTED - len(self._first)]
            if pictures:
                try:
                    given = tensors_of(self._model, pictures)
                except Exception as error:
                    raise model_failed(error, pictures) from error
                yield {name: tensor.cpu() for name, tensor in given.items()}

    def real(self, layers: Any) -> Mapping[str, int]:
        """MACs an image of every layer that ran, of the detector as it is, on the first images that came."""
        return {layer.name: layer.macs for layer in survey(self._model, self._first, layers=layers).layers}


def _pictures(batch: Any) -> list[Tensor]:
    """Of a batch: a list of images, a tensor of them, or either with targets behind it."""
    if isinstance(batch, Tensor) and batch.dim() == 4:
        return list(batch)
    if isinstance(batch, (list, tuple)) and batch:
        if all(isinstance(item, Tensor) and item.dim() == 3 for item in batch):
            return list(batch)
        if isinstance(batch[0], (list, tuple)) or (isinstance(batch[0], Tensor) and batch[0].dim() == 4):
            return _pictures(batch[0])
    shape = f" of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else ""
    raise LeanconvError(
        f"images gave a {type(batch).__name__}{shape}; a detector takes lists of images, 3 x H x W each."
    )
