"""Factors in place of a layer, at the same module path.

A *change* is the description of one replacement. It holds all that is needed to rebuild the modules; the weights
travel in the state dict.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as with_changes
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.forms.base import Choice, Form
from leanconv.forms.schemes import FORMS
from leanconv.network.fold import without_norm
from leanconv.network.layers.geometry import Geometry
from leanconv.network.layers.modules import Factored, Factors, filled, put, sequence
from leanconv.network.sites import Site


@dataclass(frozen=True, kw_only=True)
class Change:
    """``ranks``: one for each axis of the form.

    Where the next layer has taken in this one's 1 x 1 factor (see ``join``), this one is ``open``: it ends without
    that factor. The layer that took it has ``inputs`` channels coming in; if it is not factorised itself its form is
    MERGED and has no ranks.
    """

    name: str
    form: Form
    ranks: tuple[int, ...]
    geometry: Geometry
    batch_norm: str | None = None
    open: bool = False
    inputs: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "scheme": self.form.name,
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
            form=FORMS[data["scheme"]],
            ranks=tuple(data["ranks"]),
            geometry=Geometry.from_json(data["geometry"]),
            batch_norm=data["batch_norm"],
            open=data["open"],
            inputs=data["inputs"],
        )


def change_of(site: Site, choice: Choice) -> Change:
    """What a choice makes of a layer."""
    return Change(
        name=site.name, form=choice.form, ranks=choice.ranks, geometry=site.geometry, batch_norm=site.batch_norm
    )


def factor_modules(change: Change) -> nn.Sequential:
    """The modules of a change, weights not yet set."""
    geometry = change.geometry
    if change.inputs is not None:
        geometry = with_changes(geometry, in_channels=change.inputs)
    modules = sequence(**change.form.modules(geometry, change.ranks))
    return modules[:-1] if change.open else modules


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


@torch.no_grad()
def join(model: nn.Module, giver: Change, taker: Change) -> tuple[Change, Change]:
    """Merge the last 1 x 1 factor of ``giver`` into the first filters of ``taker`` (see ``network.links``). Returns
    both changes as they are then."""
    first, second = model.get_submodule(giver.name), model.get_submodule(taker.name)
    assert isinstance(first, Factored)
    p, b = _matrix(first[-1]), _bias(first[-1])
    layers = list(second) if isinstance(second, nn.Sequential) else [second]
    w = _matrix(layers[0])
    # What b becomes on its way through the filters behind it, to be added once at the end.
    shift = w @ b
    for layer in layers[1:]:
        shift = _matrix(layer) @ shift
    weights = (w @ p, *(_matrix(layer) for layer in layers[1:]))
    bias = _bias(layers[-1]) + shift
    open_giver, narrow_taker = with_changes(giver, open=True), with_changes(taker, inputs=p.shape[1])
    put(model, giver.name, Factored(list(first.named_children())[:-1], first.weight.shape).train(first.training))
    put(model, taker.name, stand_in(narrow_taker, second, Factors(weights, bias)))
    return open_giver, narrow_taker


def _matrix(layer: nn.Module) -> Tensor:
    assert isinstance(layer.weight, Tensor)
    return layer.weight.detach().to(torch.float64).flatten(1)


def _bias(layer: nn.Module) -> Tensor:
    assert isinstance(layer.weight, Tensor)
    bias = layer.bias if isinstance(layer.bias, Tensor) else layer.weight.new_zeros(len(layer.weight))
    return bias.detach().to(torch.float64)
