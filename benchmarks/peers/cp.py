"""CP decomposition of one convolution (Lebedev et al., 2015): four thin layers fitted to its filters alone."""

from __future__ import annotations

from collections import OrderedDict
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from leanconv.errors import LeanconvError, unknown_name, whole
from leanconv.network.effective_conv import inherits_forward
from leanconv.network.layers.geometry import Geometry, Size
from leanconv.network.layers.kinds import geometry_of
from leanconv.network.layers.modules import Factored, Factors, filled, put
from leanconv.network.recognise import has_hooks
from leanconv.network.user_model import check_model, copied
from leanconv.pipeline.inspection import inspect_network

# Relative to filters of norm 1. Keeps the normal equations solvable where filters are dead or the rank is generous.
RIDGE = 1e-12
# Alternating least squares ends when the relative error falls by less than this in a round.
TOLERANCE = 1e-8


def cp_factors(
    weight: Tensor, rank: int, seed: int = 0, *, iterations: int = 100
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A (d x R), B (c x R), C (kh x R), D (kw x R) with weight[o, c, y, x] ~ sum over r of A[o,r] B[c,r] C[y,r] D[x,r].

    ``weight`` is d x c x kh x kw. Alternating least squares with line search, in float64 on the weight's device;
    a round takes O(d c kh kw R) time and O(d c kh R) memory. The columns of the four have equal norms.
    """
    whole("rank", rank, 1)
    whole("iterations", iterations, 1)
    if weight.dim() != 4:
        raise LeanconvError(
            f"weight has shape {tuple(weight.shape)}; CP takes the d x c x kh x kw weight of a 2-d convolution."
        )
    tensorly = _require_tensorly()
    values = weight.detach().double()
    size = values.norm()
    if not bool(torch.isfinite(size)):
        raise LeanconvError("weight has NaN or infinite values; repair or retrain the network first.")
    if not bool(size > 0):
        a, b, c, d = (values.new_zeros(length, rank) for length in values.shape)
        return a, b, c, d
    generator = torch.Generator().manual_seed(seed)
    start = [torch.randn(length, rank, generator=generator, dtype=torch.float64) for length in values.shape]
    with tensorly.backend_context("pytorch", local_threadsafe=True):
        _, factors = tensorly.decomposition.parafac(
            values / size,
            rank,
            n_iter_max=iterations,
            init=(None, [factor.to(values.device) for factor in start]),
            tol=TOLERANCE,
            l2_reg=RIDGE,
            linesearch=True,
        )
    shared = (size * torch.stack([factor.norm(dim=0) for factor in factors]).prod(dim=0)) ** 0.25
    a, b, c, d = (shared * normalize(factor, dim=0) for factor in factors)
    return a, b, c, d


def cp(model: nn.Module, layer: str, rank: int, seed: int = 0, *, iterations: int = 100) -> nn.Module:
    """A copy of ``model`` in which the Conv2d ``layer`` is 1 x 1 (c -> R), k x 1 and 1 x k (each channel by itself),
    1 x 1 (R -> d)."""
    check_model(model)
    whole("rank", rank, 1)
    whole("iterations", iterations, 1)
    network = copied(model)
    old = _convolution(network, layer)
    geometry = geometry_of(old)
    filters, channels, vertical, horizontal = cp_factors(old.weight, rank, seed, iterations=iterations)
    bias = filters.new_zeros(geometry.out_channels) if old.bias is None else old.bias
    factors = Factors((channels.T, vertical.T, horizontal.T, filters), bias)
    new = filled(lambda: _modules(geometry, rank), factors, old.weight)
    new.requires_grad_(any(parameter.requires_grad for parameter in old.parameters()))
    put(network, layer, Factored(new.named_children(), old.weight.shape).train(old.training))
    return network


def cp_macs(geometry: Geometry, in_size: Size, rank: int) -> int:
    """Multiply-accumulates of the four layers for one image. The first works on the whole input map, the second has
    the stride along its own axis only."""
    height, width = geometry.out_size(in_size)
    first = prod(in_size) * geometry.in_channels
    second = height * in_size[1] * geometry.kernel[0]
    third = height * width * geometry.kernel[1]
    last = height * width * geometry.out_channels
    return rank * (first + second + third + last)


def cp_rank(model: nn.Module, layer: str, shape: tuple[int, ...], speedup: float) -> int:
    """The largest rank at which ``layer`` costs at most 1 / ``speedup`` of its MACs on an input of ``shape``
    (1, channels, height, width)."""
    if not (isfinite(speedup) and speedup > 0):
        raise LeanconvError(f"speedup={speedup!r} must be a number above 0.")
    check_model(model)
    _convolution(model, layer)
    survey = inspect_network(model, None, shape=shape).survey
    site = next((site for site in survey.sites if site.name == layer), None)
    if site is None:
        raise LeanconvError(f"layer {layer!r} cannot be replaced: {survey.skipped[layer]}; choose another.")
    unit = cp_macs(site.geometry, site.in_size, 1)
    rank = int(site.cost.dense / (speedup * unit))
    if rank < 1:
        raise LeanconvError(
            f"layer {layer!r} can become at most {site.cost.dense / unit:.3g} times cheaper, at rank 1; "
            f"speedup={speedup:g} is too much."
        )
    return rank


def _convolution(model: nn.Module, layer: str) -> nn.Conv2d:
    """The layer of that name, if CP can replace it."""
    modules = dict(model.named_modules())
    if layer not in modules or layer == "":
        known = [name for name, module in modules.items() if name and isinstance(module, nn.Conv2d)]
        raise unknown_name(layer, known, what="layer", where="layer")
    found = modules[layer]
    if not isinstance(found, nn.Conv2d) or not inherits_forward(found):
        raise LeanconvError(f"layer {layer!r} is a {type(found).__name__}; CP takes a torch.nn.Conv2d.")
    if found.groups != 1:
        raise LeanconvError(f"layer {layer!r} has {found.groups} groups; CP takes a Conv2d with groups=1.")
    if has_hooks(found):
        raise LeanconvError(f"layer {layer!r} carries hooks, whose work would be lost; remove them first.")
    return found


def _modules(geometry: Geometry, rank: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            reduce=nn.Conv2d(geometry.in_channels, rank, 1, bias=False),
            vertical=_depthwise(geometry, 0, rank),
            horizontal=_depthwise(geometry, 1, rank),
            expand=nn.Conv2d(rank, geometry.out_channels, 1),
        )
    )


def _depthwise(geometry: Geometry, axis: int, rank: int) -> nn.Conv2d:
    """k x 1 (axis 0) or 1 x k (axis 1) with that axis' stride, padding and dilation. No factor before the last has a
    bias, so padding here is padding before all of them."""

    def along(values: Size, neutral: int) -> tuple[int, int]:
        return (values[0], neutral) if axis == 0 else (neutral, values[1])

    padding = geometry.padding
    return nn.Conv2d(
        rank,
        rank,
        along(geometry.kernel, 1),
        along(geometry.stride, 1),
        padding if isinstance(padding, str) else along(padding, 0),
        along(geometry.dilation, 1),
        groups=rank,
        bias=False,
        padding_mode=geometry.padding_mode,
    )


def _require_tensorly() -> Any:
    try:
        import tensorly
        import tensorly.decomposition
    except ImportError:
        raise LeanconvError("tensorly is not installed; pip install tensorly.") from None
    return tensorly
