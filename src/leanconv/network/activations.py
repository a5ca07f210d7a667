"""The activations leanconv knows, as torch's modules and functions. Their mathematics is in ``solve.activations``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leanconv.network.recognise import has_hooks


@dataclass(frozen=True, kw_only=True)
class ActivationSpec:
    """An activation by its name in ``solve.activations``, with its parameters.

    ``note``: why it is "identity" although an activation follows the layer; empty where none does.
    """

    name: str = "identity"
    parameters: dict[str, float | Tensor] = field(default_factory=dict)
    note: str = ""

    def same_as(self, other: ActivationSpec) -> bool:
        if (self.name, self.note, self.parameters.keys()) != (other.name, other.note, other.parameters.keys()):
            return False
        pairs = [(value, other.parameters[key]) for key, value in self.parameters.items()]
        return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


@dataclass(frozen=True)
class Parameter:
    """``name``: in ``solve.activations``. ``argument``: of torch's function, and the module's attribute, with its
    ``position`` and ``default`` in the function."""

    name: str
    argument: str
    position: int
    default: float | None


def _spellings(*names: str) -> tuple[Any, ...]:
    """torch's functions and tensor methods of these names, and those that work in place."""
    owners = (F, torch, Tensor)
    functions = [getattr(owner, name + end, None) for name in names for owner in owners for end in ("", "_")]
    return tuple(dict.fromkeys(function for function in functions if function is not None))


@dataclass(frozen=True)
class ActivationKind:
    """One activation.

    ``torch_name``: of torch's functions; ``name`` if empty. ``fixed``: arguments of torch that must have these values,
    where a module is one of several activations. ``build``: makes a module from torch's arguments, numbers only;
    ``module`` if None. ``onnx``: ONNX's operator, where it takes no attributes.
    """

    name: str
    module: type[nn.Module] | None = None
    parameters: tuple[Parameter, ...] = ()
    torch_name: str = ""
    fixed: Mapping[str, str] = field(default_factory=dict)
    build: Callable[..., nn.Module] | None = None
    onnx: str | None = None

    @cached_property
    def functions(self) -> tuple[Any, ...]:
        return _spellings(self.torch_name or self.name)

    def spec(self, read: Callable[[Parameter], Any]) -> ActivationSpec:
        values = {parameter.name: read(parameter) for parameter in self.parameters}
        return ActivationSpec(
            name=self.name,
            parameters={k: v.detach().clone() if isinstance(v, Tensor) else float(v) for k, v in values.items()},
        )


KINDS: tuple[ActivationKind, ...] = (
    ActivationKind("identity"),
    ActivationKind("relu", nn.ReLU, onnx="Relu"),
    ActivationKind("leaky_relu", nn.LeakyReLU, (Parameter("slope", "negative_slope", 1, 0.01),)),
    # A module with one slope for all filters takes as long.
    ActivationKind(
        "prelu", nn.PReLU, (Parameter("slope", "weight", 1, None),), build=lambda weight: nn.LeakyReLU(weight)
    ),
    ActivationKind("relu6", nn.ReLU6),
    ActivationKind(
        "hardtanh", nn.Hardtanh, (Parameter("low", "min_val", 1, -1.0), Parameter("high", "max_val", 2, 1.0))
    ),
    ActivationKind("silu", nn.SiLU),
    ActivationKind("gelu", nn.GELU, fixed={"approximate": "none"}),
    ActivationKind("gelu_tanh", nn.GELU, torch_name="gelu", fixed={"approximate": "tanh"}),
    ActivationKind("hardswish", nn.Hardswish),
    ActivationKind("elu", nn.ELU, (Parameter("alpha", "alpha", 1, 1.0),)),
    ActivationKind("sigmoid", nn.Sigmoid, onnx="Sigmoid"),
    ActivationKind("tanh", nn.Tanh, onnx="Tanh"),
    ActivationKind("mish", nn.Mish),
    ActivationKind(
        "softplus", nn.Softplus, (Parameter("beta", "beta", 1, 1.0), Parameter("threshold", "threshold", 2, 20.0))
    ),
)
ONNX: dict[type[nn.Module], str] = {kind.module: kind.onnx for kind in KINDS if kind.module and kind.onnx}

_BY_NAME = {kind.name: kind for kind in KINDS}
# torch's nonlinear functions of single numbers: leanconv does not know those that are not in the table.
_NONLINEAR_NAMES = (
    "abs celu clamp clamp_max clamp_min clip cos elu erf exp gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu "
    "logsigmoid mish prelu relu relu6 rrelu selu sigmoid silu sin softplus softshrink softsign square tanh tanhshrink "
    "threshold"
)
_NONLINEAR = frozenset(_spellings(*_NONLINEAR_NAMES.split()))


def activation_of_module(module: nn.Module) -> ActivationSpec | None:
    """The activation a module is; None for other modules and for one with hooks. Subclasses may compute anything, so
    only torch's own classes count."""
    for kind in KINDS:
        if type(module) is kind.module and all(getattr(module, k) == v for k, v in kind.fixed.items()):
            return None if has_hooks(module) else kind.spec(lambda parameter: getattr(module, parameter.argument))
    return None


def activation_of_call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ActivationSpec | None:
    """The activation a call of torch is, with a note where leanconv does not know it; None for another function."""

    def read(parameter: Parameter) -> Any:
        by_position = args[parameter.position] if len(args) > parameter.position else parameter.default
        return kwargs.get(parameter.argument, by_position)

    for kind in KINDS:
        if function in kind.functions and all(kwargs.get(key, "none") == value for key, value in kind.fixed.items()):
            return kind.spec(read)
    if function not in _NONLINEAR:
        return None
    name = function.__name__.strip("_")
    return ActivationSpec(note=f"the activation that follows, {name}, is not known to leanconv")


def build_activation(spec: ActivationSpec) -> nn.Module | None:
    """A module that takes as long; None for the identity."""
    kind = _BY_NAME[spec.name]
    if kind.module is None:
        return None
    arguments: dict[str, Any] = dict(kind.fixed)
    for parameter in kind.parameters:
        value = spec.parameters[parameter.name]
        arguments[parameter.argument] = float(value.flatten()[0]) if isinstance(value, Tensor) else value
    return (kind.build or kind.module)(**arguments)
