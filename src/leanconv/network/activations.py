"""The activations leanconv knows, as torch's modules and functions. Their mathematics is in ``solve.activations``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leanconv.network.recognise import has_hooks


@dataclass(frozen=True, kw_only=True)
class ActivationSpec:
    """An activation by the name ``solve.activation`` knows, with its parameters.

    ``note``: why it is "identity" though an activation follows the layer; empty where none does.
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
    """``name``: in ``solve.activations``. ``argument``: what torch's function and the module's attribute call it;
    ``position`` and ``default``: of the function's argument."""

    name: str
    argument: str
    position: int
    default: float | None


@dataclass(frozen=True, kw_only=True)
class ActivationKind:
    """One activation.

    ``fixed``: arguments of torch that must have these values, where a module is one of several activations.
    ``build``: makes a module from torch's arguments, numbers only; the first of ``modules`` if not given.
    ``onnx``: ONNX's operator, where it takes no attributes.
    """

    name: str
    modules: tuple[type[nn.Module], ...] = ()
    functions: tuple[Any, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    fixed: Mapping[str, str] = field(default_factory=dict)
    build: Callable[..., nn.Module] | None = None
    onnx: str | None = None

    def spec(self, read: Callable[[Parameter], Any]) -> ActivationSpec:
        values = {parameter.name: read(parameter) for parameter in self.parameters}
        return ActivationSpec(
            name=self.name,
            parameters={k: v.detach().clone() if isinstance(v, Tensor) else float(v) for k, v in values.items()},
        )


def _spellings(*names: str) -> tuple[Any, ...]:
    """torch's functions and tensor methods of these names, and those that work in place."""
    places = [getattr(place, name + end, None) for name in names for place in (F, torch, Tensor) for end in ("", "_")]
    return tuple(dict.fromkeys(function for function in places if function is not None))


KINDS: tuple[ActivationKind, ...] = (
    ActivationKind(name="identity"),
    ActivationKind(name="relu", modules=(nn.ReLU,), functions=_spellings("relu"), onnx="Relu"),
    ActivationKind(
        name="leaky_relu",
        modules=(nn.LeakyReLU,),
        functions=_spellings("leaky_relu"),
        parameters=(Parameter("slope", "negative_slope", 1, 0.01),),
    ),
    ActivationKind(
        name="prelu",
        modules=(nn.PReLU,),
        functions=_spellings("prelu"),
        parameters=(Parameter("slope", "weight", 1, None),),
        build=lambda weight: nn.LeakyReLU(weight),  # one slope for all filters takes as long
    ),
    ActivationKind(name="relu6", modules=(nn.ReLU6,), functions=_spellings("relu6")),
    ActivationKind(
        name="hardtanh",
        modules=(nn.Hardtanh,),
        functions=_spellings("hardtanh"),
        parameters=(Parameter("low", "min_val", 1, -1.0), Parameter("high", "max_val", 2, 1.0)),
    ),
    ActivationKind(name="silu", modules=(nn.SiLU,), functions=_spellings("silu")),
    ActivationKind(name="gelu", modules=(nn.GELU,), functions=_spellings("gelu"), fixed={"approximate": "none"}),
    ActivationKind(name="gelu_tanh", modules=(nn.GELU,), functions=_spellings("gelu"), fixed={"approximate": "tanh"}),
    ActivationKind(name="hardswish", modules=(nn.Hardswish,), functions=_spellings("hardswish")),
    ActivationKind(
        name="elu",
        modules=(nn.ELU,),
        functions=_spellings("elu"),
        parameters=(Parameter("alpha", "alpha", 1, 1.0),),
    ),
    ActivationKind(name="sigmoid", modules=(nn.Sigmoid,), functions=_spellings("sigmoid"), onnx="Sigmoid"),
    ActivationKind(name="tanh", modules=(nn.Tanh,), functions=_spellings("tanh"), onnx="Tanh"),
    ActivationKind(name="mish", modules=(nn.Mish,), functions=_spellings("mish")),
    ActivationKind(
        name="softplus",
        modules=(nn.Softplus,),
        functions=_spellings("softplus"),
        parameters=(Parameter("beta", "beta", 1, 1.0), Parameter("threshold", "threshold", 2, 20.0)),
    ),
)
ONNX: dict[type[nn.Module], str] = {module: kind.onnx for kind in KINDS if kind.onnx for module in kind.modules}

_BY_NAME = {kind.name: kind for kind in KINDS}
_BY_FUNCTION: dict[Any, list[ActivationKind]] = {}
for _kind in KINDS:
    for _function in _kind.functions:
        _BY_FUNCTION.setdefault(_function, []).append(_kind)
# Nonlinear functions, number by number, that torch has: those that are not in the table are not known.
_NONLINEAR = frozenset(
    _spellings(
        *("abs", "celu", "clamp", "clamp_max", "clamp_min", "clip", "cos", "elu", "erf", "exp", "gelu", "hardshrink"),
        *(
            "hardsigmoid",
            "hardswish",
            "hardtanh",
            "leaky_relu",
            "logsigmoid",
            "mish",
            "prelu",
            "relu",
            "relu6",
            "rrelu",
        ),
        *("selu", "sigmoid", "silu", "sin", "softplus", "softshrink", "softsign", "square", "tanh", "tanhshrink"),
        *("rrelu", "threshold"),
    )
)


def activation_of_module(module: nn.Module) -> ActivationSpec | None:
    """The activation a module is; None for another module, and for one that carries hooks. Subclasses may compute
    anything, so only torch's own classes count."""
    for kind in KINDS:
        if type(module) in kind.modules and all(getattr(module, k) == v for k, v in kind.fixed.items()):
            return None if has_hooks(module) else kind.spec(lambda parameter: getattr(module, parameter.argument))
    return None


def activation_of_call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ActivationSpec | None:
    """The activation a call of torch is, with a note where leanconv does not know it; None for another function."""

    def read(parameter: Parameter) -> Any:
        given = args[parameter.position] if len(args) > parameter.position else parameter.default
        return kwargs.get(parameter.argument, given)

    for kind in _BY_FUNCTION.get(function, ()):
        if all(kwargs.get(key, "none") == value for key, value in kind.fixed.items()):
            return kind.spec(read)
    if function not in _NONLINEAR:
        return None
    name = function.__name__.strip("_")
    return ActivationSpec(note=f"the activation that follows, {name}, is not known to leanconv")


def build_activation(spec: ActivationSpec) -> nn.Module | None:
    """A module that takes as long; None for the identity."""
    kind = _BY_NAME[spec.name]
    if not kind.modules:
        return None
    arguments: dict[str, Any] = dict(kind.fixed)
    for parameter in kind.parameters:
        value = spec.parameters[parameter.name]
        arguments[parameter.argument] = float(value.flatten()[0]) if isinstance(value, Tensor) else value
    return (kind.build or kind.modules[0])(**arguments)
