"""Networks from scratch: He's initialisation, factored layers included."""

from __future__ import annotations

from math import prod, sqrt
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from leanconv.errors import LeanconvError
from leanconv.network.user_model import copied

# Parameters that start as constants, which reset_parameters() sets; running statistics too.
CONSTANT = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.PReLU)


def initialise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give ``model``, in place, the weights a training starts from, and return it.

    Weights of convolutions and Linear layers are normal with variance gain / inputs, where inputs are the numbers one
    output sums over. The gain is 2, which makes up for what a ReLU takes away, and 1 where a factor of an accelerated
    layer goes into the next factor as it is. Biases are 0, norms as new. The same seed gives the same weights on every
    device; the global random state is not used.
    """
    _refuse_others(model)
    generator = torch.Generator().manual_seed(seed)
    inner = {id(module) for chain in model.modules() if _is_factored(chain) for module in list(chain.children())[:-1]}
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, CONSTANT):
                module.reset_parameters()
            elif isinstance(module, (_ConvNd, nn.Linear)):
                deviation = sqrt((1 if id(module) in inner else 2) / _inputs(module))
                module.weight.copy_(deviation * torch.randn(module.weight.shape, generator=generator))
                if module.bias is not None:
                    module.bias.zero_()
    return model


def scratch(model: nn.Module, seed: int = 0) -> nn.Module:
    """A copy of ``model`` with nothing of its training left in it: what an accelerated network is compared with."""
    return initialise(copied(model), seed)


def _refuse_others(model: nn.Module) -> None:
    """Values of an earlier training that nobody resets would make 'from scratch' a lie."""
    for path, module in model.named_modules():
        known = {"weight", "bias"} if isinstance(module, (_ConvNd, nn.Linear, *CONSTANT)) else set()
        others = [name for name, _ in module.named_parameters(recurse=False) if name not in known]
        if others:
            raise LeanconvError(
                f"{path or 'the model'} ({type(module).__name__}) has the parameter {others[0]!r}, and only those of "
                "convolutions, Linear layers, norms and PReLU can be initialised; initialise this network yourself."
            )


def _is_factored(module: nn.Module) -> bool:
    """Only what stands in for a layer is a sequence that answers for a weight."""
    return isinstance(module, nn.Sequential) and hasattr(module, "weight")


def _inputs(layer: Any) -> float:
    """Numbers one output sums over; a transposed convolution spreads each input over kernel / stride outputs."""
    if isinstance(layer, _ConvTransposeNd):
        return layer.in_channels // layer.groups * prod(layer.kernel_size) / prod(layer.stride)
    return float(layer.weight[0].numel())
