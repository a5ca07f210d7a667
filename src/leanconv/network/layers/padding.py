"""Padding no torch convolution has, as a module before it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from leanconv.network.layers.geometry import Geometry, Size, same_padding, torch_pad

_CONSTANT: dict[int, Callable[..., nn.Module]] = {1: nn.ConstantPad1d, 2: nn.ConstantPad2d, 3: nn.ConstantPad3d}


class PadSame(nn.Module):
    """Zeros around a map so that a strided filter has ceil(n / stride) positions, whatever n is."""

    def __init__(self, kernel: Size, stride: Size, dilation: Size) -> None:
        super().__init__()
        self.kernel, self.stride, self.dilation = kernel, stride, dilation

    def forward(self, x: Tensor) -> Tensor:
        total = same_padding(tuple(x.shape[2:]), self.kernel, self.stride, self.dilation)
        return F.pad(x, torch_pad([t // 2 for t in total], [t - t // 2 for t in total]))

    def extra_repr(self) -> str:
        return f"kernel={self.kernel}, stride={self.stride}, dilation={self.dilation}"


def pad_module(geometry: Geometry) -> nn.Module | None:
    """What goes before the convolutions, which then pad nothing; None where they can pad by themselves."""
    if not geometry.pads_apart:
        return None
    assert geometry.padding_mode == "zeros"
    if geometry.padding == "same":
        return PadSame(geometry.kernel, geometry.stride, geometry.dilation)
    before, after = geometry.margins(())
    return _CONSTANT[len(geometry.kernel)](tuple(torch_pad(before, after)), 0.0)
