"""The plain convolution that a layer of another class computes.

Libraries subclass nn.Conv2d to standardise its weight or to pad by the input's size; torch's parametrizations compute
a weight from others. In eval mode most of these are one convolution with a fixed weight. To find it, the layer runs
alone on a few maps, and the one function of torch that it calls is compared with its output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from leanconv.network.layers.geometry import Geometry, Size
from leanconv.network.layers.kinds import REPLACEABLE, LayerKind, geometry_of, kind_of, kind_of_function
from leanconv.network.recognise import has_own_forward

_DEFAULTS: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


@dataclass(frozen=True)
class Plain:
    """``weight``: d x c x kernel (c of one group; d x c for a Linear). ``bias``: d, or None."""

    geometry: Geometry
    weight: Tensor
    bias: Tensor | None


def is_plain(layer: nn.Module) -> bool:
    """Whether the layer is torch's own, its weight a parameter."""
    return type(layer) in REPLACEABLE and isinstance(layer.weight, nn.Parameter) and not has_own_forward(layer)


def plain_form(layer: nn.Module, in_size: Size) -> Plain | None:
    """What ``layer`` computes, on maps of ``in_size`` and others; None if that is not one convolution."""
    if inherits_forward(layer):
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, Tensor)
        return Plain(geometry_of(layer), weight.detach(), bias.detach() if isinstance(bias, Tensor) else None)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            plain = _observe(layer, in_size)
        # A weight of another shape than the layer's own would cost MACs that were not counted.
        return plain if plain is not None and plain.weight.shape == layer.weight.shape else None
    except Exception:  # it cannot run alone, or does something else: either way it is not a plain convolution
        return None


def inherits_forward(layer: nn.Module) -> bool:
    """Whether the layer computes what torch's own class does."""
    base = kind_of(layer).module
    same = all(getattr(type(layer), name, None) is getattr(base, name, None) for name in ("forward", "_conv_forward"))
    return same and not has_own_forward(layer)


def _observe(layer: nn.Module, in_size: Size) -> Plain | None:
    assert isinstance(layer.weight, Tensor)
    shapes = kind_of(layer).trial_shapes(layer, in_size)
    # A forward may also depend on how large the numbers are and how many images there are.
    largest = 100.0 if layer.weight.dtype == torch.float16 else 1000.0
    runs = [_run(layer, shape, scale) for shape, scale in zip(shapes, cycle((1.0, 0.001, largest)), strict=False)]
    plain = [run for run in runs if run is not None]
    if len(plain) < len(runs) or not all(_same_filters(plain[0], other) for other in plain[1:]):
        return None
    geometry = plain[0].geometry
    constant = all(run.geometry == geometry for run in plain)
    if constant and geometry.padding_after in (None, geometry.padding):
        return replace(plain[0], geometry=replace(geometry, padding_after=None))
    rule = replace(geometry, padding="same", padding_after=None)
    if all(_explains(rule, run) for run in plain):
        return replace(plain[0], geometry=rule)
    return plain[0] if constant else None


@dataclass(frozen=True)
class _Run(Plain):
    in_size: Size = ()


def _explains(rule: Geometry, run: _Run) -> bool:
    before, after = rule.margins(run.in_size)
    return replace(rule, padding=before, padding_after=after) == run.geometry


def _same_filters(one: Plain, other: Plain) -> bool:
    if (one.bias is None) != (other.bias is None) or not torch.equal(one.weight, other.weight):
        return False
    return one.bias is None or other.bias is None or torch.equal(one.bias, other.bias)


def _run(layer: nn.Module, shape: tuple[int, ...], scale: float) -> _Run | None:
    """One run on a map of numbers of both signs, none near zero, which shows where zeros are padded around it."""
    assert isinstance(layer.weight, Tensor)
    x = (scale * (torch.rand(shape) + 0.5) * torch.randn(shape).sign()).to(layer.weight)
    with _Calls() as recorded:
        output = layer(x.clone())
    if len(recorded.calls) != 1:
        return None
    kind, values, result = recorded.calls[0]
    if not isinstance(output, Tensor) or not torch.equal(output, result):
        return None
    weight, bias = values["weight"].detach().clone(), values["bias"]
    bias = None if bias is None else bias.detach().clone()
    if not kind.over_a_map:
        if not torch.equal(values["input"], x):
            return None
        return _Run(Geometry(kind=kind.name, in_channels=weight.shape[1], out_channels=len(weight)), weight, bias)
    margins = _margins(values["input"], x)
    if margins is None:
        return None
    kind, padding = kind_of(layer), values["padding"]
    geometry = Geometry(
        kind=kind.name,
        in_channels=shape[1],
        out_channels=len(weight),
        kernel=tuple(weight.shape[2:]),
        stride=kind.each(values["stride"]),
        padding=padding if isinstance(padding, str) else kind.each(padding),
        dilation=kind.each(values["dilation"]),
        groups=values["groups"],
    )
    inner = geometry.margins(tuple(values["input"].shape[2:]))
    before, after = (tuple(a + b for a, b in zip(*pair, strict=True)) for pair in zip(margins, inner, strict=True))
    return _Run(replace(geometry, padding=before, padding_after=after), weight, bias, in_size=tuple(shape[2:]))


def _margins(padded: Tensor, x: Tensor) -> tuple[Size, Size] | None:
    """Zeros before and after ``x`` in every dimension of ``padded``; None if ``padded`` is not x between zeros."""
    if padded.shape[:2] != x.shape[:2] or padded.dim() != x.dim():
        return None
    before, after = [], []
    for axis in range(2, x.dim()):
        others = tuple(other for other in range(padded.dim()) if other != axis)
        filled = (padded != 0).any(dim=others).nonzero().flatten()
        if len(filled) != x.shape[axis]:
            return None
        before.append(int(filled[0]))
        after.append(padded.shape[axis] - 1 - int(filled[-1]))
    inside = padded
    for axis, start in enumerate(before, 2):
        inside = inside.narrow(axis, start, x.shape[axis])
    return (tuple(before), tuple(after)) if torch.equal(inside, x) else None


class _Calls(TorchFunctionMode):
    """Calls of torch's convolutions and linear maps: the kind of layer, arguments by name, the result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[LayerKind, dict[str, Any], Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if kind := kind_of_function(func):
            names = ("input", "weight", *_DEFAULTS)
            self.calls.append((kind, _DEFAULTS | dict(zip(names, args, strict=False)) | (kwargs or {}), result.clone()))
        return result
