"""Building the plain modules a layer is replaced by, and filling them with weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from leanconv.network.layers.blank import blank
from leanconv.network.layers.geometry import Geometry
from leanconv.network.layers.kinds import KINDS, REPLACEABLE
from leanconv.network.layers.padding import pad_module


@dataclass(frozen=True)
class Factors:
    """Weights for the modules of a change, in order; ``bias`` belongs to the last one."""

    weights: tuple[Tensor, ...]
    bias: Tensor


def dense_modules(geometry: Geometry) -> nn.Sequential:
    """A plain layer of this geometry, weights not yet set."""
    return sequence(pad=pad_module(geometry), whole=plain_layer(geometry, geometry.out_channels, bias=True))


def sequence(**modules: nn.Module | None) -> nn.Sequential:
    """Named modules one after the other; None is left out."""
    return nn.Sequential(OrderedDict((name, module) for name, module in modules.items() if module is not None))


def plain_layer(g: Geometry, filters: int, *, bias: bool) -> nn.Module:
    """torch's own layer that looks where a layer of geometry ``g`` looks, with another number of filters. Padding that
    torch's layers do not have is left out: ``pad_module`` does it."""
    return KINDS[g.kind].build(replace(g, out_channels=filters), bias=bias)


def pointwise(g: Geometry, in_channels: int, out_channels: int, *, groups: int = 1, bias: bool = True) -> nn.Module:
    """The layer with filters of size 1 that goes with a layer of geometry ``g``."""
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
