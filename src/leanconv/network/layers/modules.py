"""The plain modules that replace a layer: building them and filling them with weights."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from leanconv.network.layers.geometry import Geometry, Size, same_padding, torch_pad
from leanconv.network.layers.kinds import KINDS, REPLACEABLE

_CONSTANT: dict[int, Callable[..., nn.Module]] = {1: nn.ConstantPad1d, 2: nn.ConstantPad2d, 3: nn.ConstantPad3d}


class Factored(nn.Sequential):
    """The factors that replace a layer, in order. A network may read the shape, dtype and device of the old layer's
    ``weight`` here. Computing with that weight gives NaN, never a wrong number."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], shape: Iterable[int]) -> None:
        super().__init__(OrderedDict(modules))
        self._shape = tuple(shape)

    @property
    def weight(self) -> Tensor:
        like = next(self.parameters())
        return torch.full((), math.nan, dtype=like.dtype, device=like.device).expand(self._shape)


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
    """Padding that no torch convolution has, as a module before it; None where the convolution can pad by itself."""
    if not geometry.pads_apart:
        return None
    assert geometry.padding_mode == "zeros"
    if geometry.padding == "same":
        return PadSame(geometry.kernel, geometry.stride, geometry.dilation)
    before, after = geometry.margins(())
    return _CONSTANT[len(geometry.kernel)](tuple(torch_pad(before, after)), 0.0)


@dataclass(frozen=True)
class Factors:
    """Weights for the modules that replace a layer, in order; ``bias`` belongs to the last one."""

    weights: tuple[Tensor, ...]
    bias: Tensor


def dense_modules(geometry: Geometry) -> nn.Sequential:
    """A plain layer of this geometry, its weights not yet set."""
    return sequence(pad=pad_module(geometry), whole=plain_layer(geometry, geometry.out_channels, bias=True))


def sequence(**modules: nn.Module | None) -> nn.Sequential:
    """Named modules one after the other; None is left out."""
    return nn.Sequential(OrderedDict((name, module) for name, module in modules.items() if module is not None))


def plain_layer(g: Geometry, filters: int, *, bias: bool) -> nn.Module:
    """torch's own layer of geometry ``g`` with another number of filters, without the padding of ``pad_module``."""
    return KINDS[g.kind].build(replace(g, out_channels=filters), bias=bias)


def pointwise(g: Geometry, in_channels: int, out_channels: int, *, groups: int = 1, bias: bool = True) -> nn.Module:
    """A layer of the kind of ``g`` with filters of size 1."""
    ones = (1,) * len(g.kernel)
    small = Geometry(
        kind=g.kind,
        in_channels=in_channels,
        out_channels=out_channels,
        kernel=ones,
        stride=ones,
        padding=(0,) * len(ones),
        dilation=ones,
        groups=groups,
    )
    return KINDS[g.kind].build(small, bias=bias)


def one_axis_convolution(g: Geometry, axis: int, in_channels: int, out_channels: int, *, bias: bool) -> nn.Conv2d:
    """A k x 1 (axis 0) or 1 x k (axis 1) convolution with that axis' stride, padding and dilation.

    Exact for every padding mode: padding a column and filtering along it do not mix with the other axis (and the
    vertical factor has no bias, so zero padding between the two is zero padding before both).
    """

    def along(values: tuple[int, ...], neutral: int) -> tuple[int, int]:
        return (values[0], neutral) if axis == 0 else (neutral, values[1])

    return nn.Conv2d(
        in_channels,
        out_channels,
        along(g.kernel, 1),
        along(g.stride, 1),
        0 if g.pads_apart else g.padding if isinstance(g.padding, str) else along(g.padding, 0),
        along(g.dilation, 1),
        bias=bias,
        padding_mode=g.padding_mode,
    )


@contextmanager
def blank() -> Iterator[None]:
    """Modules made inside the block have shapes and no values, for weights that are set afterwards. Initial values take
    most of the time of building, and random numbers from the user."""
    with torch.device("meta"), _NoInitialisation():
        yield


class _NoInitialisation(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init" or func in (Tensor.normal_, Tensor.uniform_):
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def filled(build: Callable[[], nn.Sequential], factors: Factors, like: Tensor) -> nn.Sequential:
    """Modules with ``factors`` in those that have weights, in order, of the dtype and on the device of ``like``."""
    with blank():
        modules = build()
    weighted = [module for module in modules if isinstance(module, REPLACEABLE)]
    for module, weight in zip(weighted, factors.weights, strict=True):
        module.weight = _parameter(weight.reshape(module.weight.shape), like)
    assert weighted[-1].bias is not None
    weighted[-1].bias = _parameter(factors.bias, like)
    return modules


def _parameter(values: Tensor, like: Tensor) -> nn.Parameter:
    own = values.detach().to(like.device, like.dtype, copy=True, memory_format=torch.contiguous_format)
    return nn.Parameter(own)


def put(model: nn.Module, path: str, module: nn.Module) -> None:
    """Make ``module`` the submodule at ``path``."""
    parent_path, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent_path), leaf, module)
