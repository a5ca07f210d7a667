"""Factors in place of a layer, at the same module path.

A *change* is the description of one replacement. It holds all that is needed to rebuild the modules; the weights
travel in the state dict.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as with_changes
from typing import Any, Literal

import torch
from torch import Tensor, nn

from leanconv.network.fold import without_norm
from leanconv.network.layers.factored import Factored
from leanconv.network.layers.geometry import Geometry, Scheme
from leanconv.network.layers.modules import (
    Factors,
    dense_modules,
    filled,
    one_axis_convolution,
    plain_layer,
    pointwise,
    sequence,
)
from leanconv.network.layers.padding import pad_module

Form = Scheme | Literal["merged"]


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
    if change.scheme == "channel":
        (rank,) = change.ranks
        wide = rank * g.groups
        return sequence(
            pad=pad_module(g),
            reduce=plain_layer(g, wide, bias=False),
            expand=pointwise(g, wide, g.out_channels, groups=g.groups),
        )
    spatial_rank = change.ranks[0]
    vertical = one_axis_convolution(g, 0, g.in_channels, spatial_rank, bias=False)
    if change.scheme == "spatial":
        horizontal = one_axis_convolution(g, 1, spatial_rank, g.out_channels, bias=True)
        return sequence(pad=pad_module(g), vertical=vertical, horizontal=horizontal)
    channel_rank = change.ranks[1]
    return sequence(
        pad=pad_module(g),
        vertical=vertical,
        horizontal=one_axis_convolution(g, 1, spatial_rank, channel_rank, bias=False),
        expand=pointwise(g, channel_rank, g.out_channels),
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


def _channels_last(weight: Tensor) -> bool:
    return weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


def put(model: nn.Module, path: str, module: nn.Module) -> None:
    """Make ``module`` the submodule at ``path``."""
    parent_path, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent_path), leaf, module)
