"""Recognising batch norms, sums and modules that do more than their class says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torchvision.ops import FrozenBatchNorm2d

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, FrozenBatchNorm2d)
# Sums of two tensors: a residual connection when one of them is a response.
ADDITIONS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)


def is_addition(function: Any, kwargs: dict[str, Any], operands: list[Tensor]) -> bool:
    """a + b of two tensors of one shape; alpha or broadcasting makes it something else."""
    return (
        function in ADDITIONS
        and kwargs.get("alpha", 1) == 1
        and len(operands) == 2
        and operands[0] is not operands[1]
        and operands[0].shape == operands[1].shape
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether the user's code runs in or around this module's forward.

    torch's older weight_norm and spectral_norm are hooks that compute the weight: the layer stays what it is.
    """
    before = [hook for hook in module._forward_pre_hooks.values() if not isinstance(hook, (WeightNorm, SpectralNorm))]
    others = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(before or others) or has_own_forward(module)


def has_own_forward(module: nn.Module) -> bool:
    """Whether the instance has a forward that is not its class's."""
    return not {"forward", "_conv_forward"}.isdisjoint(vars(module))


def is_batch_norm(module: nn.Module) -> bool:
    """A batch norm that is a fixed affine map in eval mode."""
    return type(module) in BATCH_NORMS and module.running_mean is not None and not has_hooks(module)


def is_norm_with_activation(module: nn.Module) -> bool:
    """timm's batch norm followed by an activation, in one module. By name: timm need not be installed."""
    kind = type(module)
    named = kind.__name__ == "BatchNormAct2d" and kind.__module__.startswith("timm.")
    return named and module.running_mean is not None and not has_hooks(module)
