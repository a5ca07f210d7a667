"""The module that stands where a layer stood."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Factored(nn.Sequential):
    """Factors in a row. It answers what a network may ask of the layer that stood here without computing with it:
    the shape, dtype and device of its ``weight``. Whoever computes with that weight gets NaN, never a wrong number.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], shape: Iterable[int]) -> None:
        super().__init__()
        for name, module in modules:
            self.add_module(name, module)
        self._shape = tuple(shape)

    @property
    def weight(self) -> Tensor:
        like = next(self.parameters())
        return torch.full((), math.nan, dtype=like.dtype, device=like.device).expand(self._shape)
