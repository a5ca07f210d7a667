"""Recognising activations and batch norms, as modules and as functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torchvision.ops import FrozenBatchNorm2d

from leanconv.network.sites import ActivationSpec

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, FrozenBatchNorm2d)
# Sums of two tensors: a residual connection when one of them is a response.
ADDITIONS: frozenset[Any] = frozenset(
    [
        torch.add,
        Tensor.add,
        Tensor.add_,
        Tensor.__add__,
        Tensor.__radd__,
        Tensor.__iadd__,
    ]
)


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
    """Whether somebody else's code runs in or around this module's forward.

    torch's older weight_norm and spectral_norm are hooks that compute the weight: the layer stays what it is.
    """
    before = [hook for hook in module._forward_pre_hooks.values() if not isinstance(hook, (WeightNorm, SpectralNorm))]
    return bool(
        before
        or module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or has_own_forward(module)
    )


def has_own_forward(module: nn.Module) -> bool:
    """Whether a method that computes was put on the instance."""
    return not {"forward", "_conv_forward"}.isdisjoint(vars(module))


def is_batch_norm(module: nn.Module) -> bool:
    """A batch norm that is a fixed affine map in eval mode."""
    return type(module) in BATCH_NORMS and module.running_mean is not None and not has_hooks(module)


def is_norm_with_activation(module: nn.Module) -> bool:
    """timm's batch norm with an activation behind it, two steps in one module. By name: timm need not be there."""
    kind = type(module)
    named = kind.__name__ == "BatchNormAct2d" and kind.__module__.startswith("timm.")
    return named and module.running_mean is not None and not has_hooks(module)


def activation_module(module: nn.Module) -> ActivationSpec | None:
    """The activation a module is, or None. Subclasses may compute anything, so only exact types count."""
    maker = _MODULES.get(type(module))
    return None if maker is None or has_hooks(module) else maker(module)


def activation_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ActivationSpec | None:
    """The activation a function call is, or None."""
    maker = _FUNCTIONS.get(function)
    return None if maker is None else maker(args, kwargs)


def _named(name: str) -> Callable[..., ActivationSpec]:
    return lambda *_: ActivationSpec(name=name)


def _gelu(approximate: str) -> ActivationSpec:
    return ActivationSpec(name="gelu_tanh" if approximate == "tanh" else "gelu")


def _hardtanh(low: float, high: float) -> ActivationSpec:
    return ActivationSpec(name="hardtanh", parameters={"low": float(low), "high": float(high)})


def _leaky(slope: float) -> ActivationSpec:
    return ActivationSpec(name="leaky_relu", parameters={"slope": float(slope)})


def _elu(alpha: float) -> ActivationSpec:
    return ActivationSpec(name="elu", parameters={"alpha": float(alpha)})


def _prelu(weight: Tensor) -> ActivationSpec:
    return ActivationSpec(name="prelu", parameters={"slope": weight.detach().clone()})


_MODULES: dict[type[nn.Module], Callable[[Any], ActivationSpec]] = {
    nn.ReLU: _named("relu"),
    nn.ReLU6: _named("relu6"),
    nn.SiLU: _named("silu"),
    nn.Hardswish: _named("hardswish"),
    nn.Sigmoid: _named("sigmoid"),
    nn.Tanh: _named("tanh"),
    nn.GELU: lambda m: _gelu(m.approximate),
    nn.Hardtanh: lambda m: _hardtanh(m.min_val, m.max_val),
    nn.LeakyReLU: lambda m: _leaky(m.negative_slope),
    nn.ELU: lambda m: _elu(m.alpha),
    nn.PReLU: lambda m: _prelu(m.weight),
}


def _argument(position: int, name: str, default: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    return lambda args, kwargs: args[position] if len(args) > position else kwargs.get(name, default)


_slope = _argument(1, "negative_slope", 0.01)
_alpha = _argument(1, "alpha", 1.0)
_low = _argument(1, "min_val", -1.0)
_high = _argument(2, "max_val", 1.0)
_weight = _argument(1, "weight", None)

_TANH: list[Any] = [F.tanh, torch.tanh, torch.tanh_, Tensor.tanh, Tensor.tanh_]

_FUNCTIONS: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], ActivationSpec]] = {
    **dict.fromkeys([F.relu, torch.relu, torch.relu_, F.relu_, Tensor.relu, Tensor.relu_], _named("relu")),
    **dict.fromkeys([F.relu6], _named("relu6")),
    **dict.fromkeys([F.silu], _named("silu")),
    **dict.fromkeys([F.hardswish], _named("hardswish")),
    **dict.fromkeys([F.sigmoid, torch.sigmoid, torch.sigmoid_, Tensor.sigmoid, Tensor.sigmoid_], _named("sigmoid")),
    **dict.fromkeys(_TANH, _named("tanh")),
    F.gelu: lambda a, k: _gelu(k.get("approximate", "none")),
    **dict.fromkeys([F.leaky_relu, F.leaky_relu_], lambda a, k: _leaky(_slope(a, k))),
    **dict.fromkeys([F.elu, F.elu_], lambda a, k: _elu(_alpha(a, k))),
    **dict.fromkeys([F.hardtanh, F.hardtanh_], lambda a, k: _hardtanh(_low(a, k), _high(a, k))),
    **dict.fromkeys([F.prelu, torch.prelu, Tensor.prelu], lambda a, k: _prelu(_weight(a, k))),
}
