"""Factors in place of a layer, at the same module path.

A *change* is the description of one replacement. It holds all that is needed to rebuild the modules; the weights
travel in the state dict.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as with_changes
from typing import Any, Literal

import torch
from torch import Tensor, nn

from leanconv.network.fold import without_norm
from leanconv.network.layers.blank import blank
from leanconv.network.layers.factored import Factored
from leanconv.network.layers.geometry import Geometry, Scheme
from leanconv.network.layers.padding import pad_module
from leanconv.network.recognise import LAYERS

Form = Scheme | Literal["merged"]

CLASSES: dict[str, Callable[..., nn.Module]] = {"conv1d": nn.Conv1d, "conv2d": nn.Conv2d, "conv3d": nn.Conv3d}


@dataclass(frozen=True, kw_only=True)
class Change:
    """``ranks`` is (d',) for channel, (d'',) for spatial, (d'', d') for 3d.

    Where a layer has handed its 1 x 1 factor on to the next (see ``links``), it is ``open``: it ends without that
    factor. The layer that took it has ``inputs`` channels coming in; if it is not factorised itself its scheme is
    "merged" and its ranks are empty.
    """

    name: str
    scheme: Form
    ranks: tuple[int, ...]
    geometry: Geometry
    batch_norm: str | None = None
    open: bool = False
    inputs: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "scheme": self.scheme,
            "ranks": list(self.ranks),
            "geometry": self.geometry.to_json(),
            "batch_norm": self.batch_norm,
            "open": self.open,
            "inputs": self.inputs,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Change:
        return cls(
            name=data["name"],
            scheme=data["scheme"],
            ranks=tuple(data["ranks"]),
            geometry=Geometry.from_json(data["geometry"]),
            batch_norm=data["batch_norm"],
            open=data["open"],
            inputs=data["inputs"],
        )


@dataclass(frozen=True)
class Factors:
    """Weights for the modules of a change, in order; ``bias`` belongs to the last one."""

    weights: tuple[Tensor, ...]
    bias: Tensor


def factor_modules(change: Change) -> nn.Sequential:
    """The modules of a change, weights not yet set."""
    modules = _factor_modules(change)
    return modules[:-1] if change.open else modules


def _factor_modules(change: Change) -> nn.Sequential:
    g = change.geometry
    if change.inputs is not None:
        g = with_changes(g, in_channels=change.inputs)
    if change.scheme == "merged":
        return dense_modules(g)
    if g.kind == "linear":
        (rank,) = change.ranks
        return _sequence(
            reduce=nn.Linear(g.in_channels, rank, bias=False),
            expand=nn.Linear(rank, g.out_channels),
        )
    if change.scheme == "channel":
        (rank,) = change.ranks
        wide = rank * g.groups
        return _sequence(
            pad=pad_module(g),
            reduce=_convolution(g, wide, bias=False),
            expand=CLASSES[g.kind](wide, g.out_channels, 1, groups=g.groups),
        )
    spatial_rank = change.ranks[0]
    vertical = _one_way(g, 0, g.in_channels, spatial_rank, bias=False)
    if change.scheme == "spatial":
        horizontal = _one_way(g, 1, spatial_rank, g.out_channels, bias=True)
        return _sequence(pad=pad_module(g), vertical=vertical, horizontal=horizontal)
    channel_rank = change.ranks[1]
    return _sequence(
        pad=pad_module(g),
        vertical=vertical,
        horizontal=_one_way(g, 1, spatial_rank, channel_rank, bias=False),
        expand=nn.Conv2d(channel_rank, g.out_channels, 1),
    )


def dense_modules(geometry: Geometry) -> nn.Sequential:
    """A plain layer of this geometry, weights not yet set."""
    if geometry.kind == "linear":
        return _sequence(whole=nn.Linear(geometry.in_channels, geometry.out_channels))
    return _sequence(pad=pad_module(geometry), whole=_convolution(geometry, geometry.out_channels, bias=True))


def _sequence(**modules: nn.Module | None) -> nn.Sequential:
    return nn.Sequential(OrderedDict((name, module) for name, module in modules.items() if module is not None))


def _convolution(g: Geometry, filters: int, *, bias: bool) -> nn.Module:
    return CLASSES[g.kind](
        g.in_channels,
        filters,
        g.kernel,
        g.stride,
        0 if g.pads_apart else g.padding,
        g.dilation,
        g.groups,
        bias=bias,
        padding_mode=g.padding_mode,
    )


def _one_way(g: Geometry, axis: int, in_channels: int, out_channels: int, *, bias: bool) -> nn.Conv2d:
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


def replace(model: nn.Module, change: Change, factors: Factors | None = None) -> None:
    """Put the factors in place of the layer, and nothing in place of the batch norm folded into them."""
    put(model, change.name, stand_in(change, model.get_submodule(change.name), factors))
    if change.batch_norm is not None:
        put(model, change.batch_norm, without_norm(model.get_submodule(change.batch_norm)))


def stand_in(change: Change, old: nn.Module, factors: Factors | None) -> Factored:
    """The modules of a change with the dtype, device, memory format and flags of the layer they replace."""
    assert isinstance(old.weight, Tensor)
    if factors is None:
        with torch.device(old.weight.device):
            new = factor_modules(change).to(old.weight.dtype)
    else:
        new = filled(lambda: factor_modules(change), factors, old.weight)
    if _channels_last(old.weight):
        new.to(memory_format=torch.channels_last)
    # A weight that is computed from others carries no flag of its own.
    new.requires_grad_(any(parameter.requires_grad for parameter in old.parameters()))
    return Factored(new.named_children(), old.weight.shape).train(old.training)


def filled(build: Callable[[], nn.Sequential], factors: Factors, like: Tensor) -> nn.Sequential:
    """Modules with ``factors`` in those that have weights, in order, of the dtype and on the device of ``like``."""
    with blank():
        modules = build()
    weighted = [module for module in modules if isinstance(module, LAYERS)]
    for module, weight in zip(weighted, factors.weights, strict=True):
        module.weight = _parameter(weight.reshape(module.weight.shape), like)
    assert weighted[-1].bias is not None
    weighted[-1].bias = _parameter(factors.bias, like)
    return modules


def _parameter(values: Tensor, like: Tensor) -> nn.Parameter:
    own = values.detach().to(like.device, like.dtype, copy=True, memory_format=torch.contiguous_format)
    return nn.Parameter(own)


def _channels_last(weight: Tensor) -> bool:
    return weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


def put(model: nn.Module, path: str, module: nn.Module) -> None:
    """Make ``module`` the submodule at ``path``."""
    parent_path, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent_path), leaf, module)
