"""Filters in the order the kernels read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from leanconv.kernels.fused_stage import PACKED, Stage, precision, up


@dataclass(frozen=True)
class Matrix:
    """Filters as a matrix of inputs x filters, padded with zeros. float32 is transposed in memory: matrix units read
    half precision either way, float32 only along the inputs."""

    values: Tensor
    rows: int  # of each tap

    @property
    def strides(self) -> tuple[int, int]:
        inputs, filters = self.values.stride()
        return inputs, filters


T = TypeVar("T")
# tensor -> {key: (version and address of the tensor, what was made of it)}
_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _once(tensor: Tensor, key: object, make: Callable[[], T]) -> T:
    """What ``make`` makes of ``tensor``, made again only when the tensor has changed."""
    if tensor.is_inference():  # changes of it cannot be seen
        return make()
    state = (tensor._version, tensor.data_ptr())
    made = _made.setdefault(tensor, {})
    old: tuple[tuple[int, int], T] | None = made.get(key)
    if old is not None and old[0] == state:
        return old[1]
    # Not in inference mode: of a tensor made there nothing more could be made once and kept.
    with torch.inference_mode(False), torch.no_grad():
        new = make() if old is None else _into(old[1], make())
    # Memory that belongs to a graph being recorded must not be kept beyond it.
    if not (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        made[key] = (state, new)
    return new


def _into(old: Any, new: Any) -> Any:
    """``new`` in the memory of ``old``, if it fits: a graph recorded with the old follows."""
    if isinstance(new, Matrix):
        return Matrix(_into(old.values, new.values), new.rows)
    fits = (old.shape, old.stride(), old.dtype, old.device) == (new.shape, new.stride(), new.dtype, new.device)
    return old.copy_(new) if fits else new


def forget(weight: Tensor) -> None:
    """Drop what was made of ``weight``."""
    _made.pop(weight, None)


def packed(weight: Tensor, *, flat: bool, columns: int) -> Matrix:
    """``weight`` (filters x channels x kh x kw), packed once for as long as it does not change."""
    key = (flat, columns, precision(weight.dtype))
    return _once(weight, key, lambda: _matrix(weight, flat, columns))


def padded_bias(bias: Tensor, stage: Stage) -> Tensor:
    """``bias`` with zeros, long enough for every column that is computed."""
    length = up(max(stage.outputs, stage.columns), PACKED)
    return _once(bias, length, lambda: F.pad(bias.detach(), (0, length - len(bias))))


def aligned(first: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of two convolutions in a row, the channels between them padded with zeros to a multiple of 16: a GPU
    then reads the map between them in large pieces."""
    filters = first.shape[0]
    more = up(filters, 16) - filters
    if more == 0:
        return first, following
    return (
        _once(first, "filters", lambda: F.pad(first.detach(), (0, 0, 0, 0, 0, 0, 0, more))),
        _once(following, "channels", lambda: F.pad(following.detach(), (0, 0, 0, 0, 0, more))),
    )


def _matrix(weight: Tensor, flat: bool, columns: int) -> Matrix:
    filters, channels, high, wide = weight.shape
    taps = weight.detach().permute(2, 3, 1, 0).reshape(high * wide, channels, filters)  # tap x channel x filter
    if flat:
        taps = taps.reshape(1, high * wide * channels, filters)
    rows = up(taps.shape[1], PACKED)
    taps = F.pad(taps, (0, columns - filters, 0, rows - taps.shape[1]))
    values = to_tf32(taps.reshape(-1, columns))
    return Matrix(values.t().contiguous().t() if values.dtype == torch.float32 else values.contiguous(), rows)


def to_tf32(values: Tensor) -> Tensor:
    """Where TF32 is allowed, float32 rounded to the ten bits that matrix units keep: they would cut the rest off."""
    if precision(values.dtype) != "tf32" or not values.is_cuda:
        return values
    return ((values.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
