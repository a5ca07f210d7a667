"""A detector's calibration images: what it makes of them, and the boxes it looks at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.errors import LeanconvError
from leanconv.network.survey import survey
from leanconv.network.torchvision_detectors import tensors_of
from leanconv.network.user_model import model_failed

# Images the real cost of a detector is counted on, one by one: sizes and boxes differ from image to image.
COUNTED = 4
# A plain tensor of images is cut into batches of this size.
CUT = 8


class Detections:
    """Batches of ``images`` (lists of 3 x H x W tensors, or with targets behind them) as ``model``, an original
    detector on ``device``, sees them. They can be gone through once."""

    def __init__(self, model: nn.Module, images: Iterable[Any], device: torch.device):
        self._model, self._images, self._device = model, images, device
        self._first: list[Tensor] = []

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        batches = self._images.split(CUT) if isinstance(self._images, Tensor) else self._images
        for batch in batches:
            pictures = [picture.to(self._device) for picture in _pictures(batch)]
            self._first += pictures[: COUNTED - len(self._first)]
            if pictures:
                try:
                    given = tensors_of(self._model, pictures)
                except Exception as error:
                    raise model_failed(error, pictures) from error
                yield {name: tensor.cpu() for name, tensor in given.items()}

    def real(self, layers: Any) -> Mapping[str, int]:
        """MACs an image of every layer that ran, of the detector as it is: the mean over the first images that came."""
        total: Counter[str] = Counter()
        for picture in self._first:
            try:
                found = survey(self._model, [picture], layers=layers)
            except LeanconvError:
                raise
            except Exception as error:
                raise model_failed(error, [picture]) from error
            total.update({layer.name: layer.macs for layer in found.layers})
        return {name: round(macs / len(self._first)) for name, macs in total.items()}


def _pictures(batch: Any) -> list[Tensor]:
    """Of a batch: a list of images, a tensor of them, or either with targets behind it."""
    if isinstance(batch, Tensor) and batch.dim() == 4:
        return list(batch)
    if isinstance(batch, (list, tuple)):
        if all(isinstance(item, Tensor) and item.dim() == 3 for item in batch):
            return list(batch)
        # Not all are images, so there is a first.
        if isinstance(batch[0], (list, tuple)) or (isinstance(batch[0], Tensor) and batch[0].dim() == 4):
            return _pictures(batch[0])
    shape = f" of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else ""
    raise LeanconvError(
        f"images gave a {type(batch).__name__}{shape}; a detector takes batches that are lists of "
        "images, 3 x H x W each: [[image, ...], ...]."
    )
