"""The 1 x 1 factor of a layer taken into the 1 x 1 filters of the next (see ``network.links``)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from leanconv.forms.replace import Change, stand_in
from leanconv.network.layers.modules import Factored, Factors, put


@torch.no_grad()
def join(model: nn.Module, giver: Change, taker: Change) -> tuple[Change, Change]:
    """Take the last factor of ``giver`` into the first filters of ``taker``; both as they now are."""
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
    open_giver, narrow_taker = replace(giver, open=True), replace(taker, inputs=p.shape[1])
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
