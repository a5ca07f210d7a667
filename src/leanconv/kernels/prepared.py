"""A factorised layer on a GPU: cut into stages, each computed by its fastest plan, and the launches kept.

Finding out what to launch takes longer in Python than many a layer takes on the GPU. What depends on the weights and on
the size of the map is therefore kept beside the first weight, until a weight changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from leanconv.kernels.eager import run_eagerly
from leanconv.kernels.fused_stage import EAGER, WIDEST, Stage, up
from leanconv.kernels.launch import empty, prepare, run
from leanconv.kernels.pack import aligned
from leanconv.kernels.tune import choose
from leanconv.system.precision import tf32

# From one map, and an addend, to the next.
Step = Callable[[Tensor, Tensor | None], Tensor]
# Sizes of maps kept for each layer; a detector sees many.
MANY = 64
# first weight -> (all weights, their versions and addresses, {size of the map and so on: steps})
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def forget(weight: Tensor) -> None:
    """Drop what was prepared with ``weight`` as the first."""
    _kept.pop(weight, None)


class Layer(NamedTuple):
    """A layer without its map and addend, as in ``eager``."""

    weights: Sequence[Tensor]
    bias: Tensor | None
    geometry: Sequence[int]
    activation: str
    pool: bool


def compute(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    addend: Tensor | None,
    geometry: Sequence[int],
    activation: str,
    pool: bool,
) -> Tensor:
    """``eager`` by the kernels; ``x`` is on a GPU that has them."""
    x = x.contiguous(memory_format=torch.channels_last)
    addend = None if addend is None else addend.contiguous(memory_format=torch.channels_last)
    with torch.cuda.device_of(x):
        for step in _steps(x, addend, Layer(weights, bias, geometry, activation, pool)):
            x = step(x, addend)
    return x


def _steps(x: Tensor, addend: Tensor | None, layer: Layer) -> list[Step]:
    weights = layer.weights
    tensors = weights if layer.bias is None else [*weights, layer.bias]
    if any(tensor.is_inference() for tensor in tensors):  # changes of them cannot be seen
        return _prepared(x, addend, layer)
    state = [(tensor._version, tensor.data_ptr()) for tensor in tensors]
    kept = _kept.get(weights[0])
    # The same tensors, not others at the same addresses.
    same = kept is not None and kept[1] == state and all(ref() is t for ref, t in zip(kept[0], tensors, strict=True))
    if kept is None or not same:
        kept = _kept[weights[0]] = ([TensorWeakRef(tensor) for tensor in tensors], state, {})
    by_map: dict[object, list[Step]] = kept[2]
    key = (x.shape, x.dtype, x.device, addend is None, tuple(layer.geometry), layer.activation, layer.pool, tf32())
    steps = by_map.get(key)
    if steps is None:
        steps = _prepared(x, addend, layer)
        # While a graph is recorded nothing is measured, and what is packed belongs to the graph.
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return steps
        if x.is_cuda:  # what was packed is there for other streams too
            torch.cuda.current_stream(x.device).synchronize()
        if len(by_map) >= MANY:
            by_map.clear()
        by_map[key] = steps
    return steps


def _prepared(x: Tensor, addend: Tensor | None, layer: Layer) -> list[Step]:
    """The steps of all stages. All stages but the last are computed on the way: each is measured on its own map."""
    weights = list(layer.weights)
    steps: list[Step] = []
    start = 0
    while True:
        # A 1 x 1 layer goes with the convolution before it.
        end = start + 2 if _goes_along(weights, layer.geometry, start + 1) else start + 1
        geometry = layer.geometry[6 * start : 6 * end]
        if end == len(weights):
            return steps + _stage_steps(x, addend, layer._replace(weights=weights[start:], geometry=geometry))
        weights[end - 1], weights[end] = aligned(weights[end - 1], weights[end])
        more = _stage_steps(x, None, Layer(weights[start:end], None, geometry, "none", False))
        for step in more:
            x = step(x, None)
        steps += more
        start = end


def _goes_along(weights: Sequence[Tensor], geometry: Sequence[int], index: int) -> bool:
    if index >= len(weights) or weights[index].shape[2:] != (1, 1) or up(weights[index - 1].shape[0], 16) > WIDEST:
        return False
    return list(geometry[6 * index : 6 * index + 4]) == [1, 1, 0, 0]


def _stage_steps(x: Tensor, addend: Tensor | None, layer: Layer) -> list[Step]:
    """One stage, a convolution or the 1 x 1 layer behind it too, by the fastest plan there is."""
    weight, second = layer.weights[0], layer.weights[1] if len(layer.weights) > 1 else None
    bias = layer.bias
    down, across, pad_down, pad_across, apart_down, apart_across = layer.geometry[:6]
    images, channels, high, wide = x.shape
    stage = Stage(
        dtype=x.dtype,
        images=images,
        size=(high, wide),
        channels=channels,
        rank=weight.shape[0],
        filters=None if second is None else second.shape[0],
        kernel=(weight.shape[2], weight.shape[3]),
        stride=(down, across),
        padding=(pad_down, pad_across),
        dilation=(apart_down, apart_across),
        bias=bias is not None,
        addend=addend is not None,
        activation=layer.activation,
        pool=layer.pool,
    )
    if layer.pool and (addend is not None or any(size % 2 for size in stage.out_size)):
        # Windows do not fill the map, or the addend is larger than what is written.
        unpooled = _stage_steps(x, addend, layer._replace(pool=False))
        return [*unpooled, lambda y, _: F.max_pool2d(y, 2)]
    shape = (images, stage.outputs, *stage.out_size)

    def whole(added: Tensor | None) -> Tensor | None:
        """As large as what it is added to. A stage in the middle gets the layer's addend too, and does not use it."""
        if added is None or not stage.addend or added.shape == shape:
            return added if stage.addend else None
        return added.expand(shape).contiguous(memory_format=torch.channels_last)

    if images == 0 or min(stage.out_size) < 1:  # nothing to measure; or torch will say what is wrong
        plan = EAGER
    else:
        plan = choose(stage, x.device, lambda plan: run(stage, plan, x, weight, second, bias, whole(addend)))
    if plan.form == "eager":
        # Not the weights themselves: kept beside the first of them, they would keep it alive.
        first = weight.detach()
        then, add = (None if tensor is None else tensor.detach() for tensor in (second, bias))

        def eagerly(y: Tensor, added: Tensor | None) -> Tensor:
            answer = run_eagerly(stage, y, first, then, add, whole(added))
            return answer.contiguous(memory_format=torch.channels_last)

        return [eagerly]
    launch = prepare(stage, plan, weight, second, bias)

    def launched(y: Tensor, added: Tensor | None) -> Tensor:
        out = empty(stage, y)
        if out.numel():
            launch(y, whole(added), out)
        return out

    return [launched]
