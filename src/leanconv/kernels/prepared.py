"""A factorised layer on a GPU: cut into stages, each computed the fastest way, and the launches kept for the next map.

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

from leanconv.kernels.fused_stage import EAGER, WIDEST, Stage, up
from leanconv.kernels.launch import empty, prepare, run, run_eagerly
from leanconv.kernels.pack import aligned
from leanconv.kernels.tune import choose
from leanconv.system.precision import tf32

# From one map, and an addend, to the next.
Step = Callable[[Tensor, Tensor | None], Tensor]
# Sizes of maps kept a layer; a detector sees many.
MANY = 64
# first weight -> (all weights, what they were, {map, addend, geometry and so on: steps})
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def forget(weight: Tensor) -> None:
    """What was prepared with ``weight`` as the first."""
    _kept.pop(weight, None)


class Layer(NamedTuple):
    """What a layer is beside its map and addend: ``op.eager`` says what each is."""

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
    """``op.eager``'s numbers, by the kernels; ``x`` is on a GPU that has them."""
    last = torch.channels_last
    x = x.contiguous(memory_format=last)
    addend = None if addend is None else addend.contiguous(memory_format=last)
    with torch.cuda.device_of(x):
        for step in _steps(x, addend, Layer(weights, bias, geometry, activation, pool)):
            x = step(x, addend)
    return x


def _steps(x: Tensor, addend: Tensor | None, layer: Layer) -> list[Step]:
    weights = layer.weights
    tensors = weights if layer.bias is None else [*weights, layer.bias]
    if any(tensor.is_inference() for tensor in tensors):  # whose changes cannot be seen
        return _prepared(x, addend, layer)
    now = [(tensor._version, tensor.data_ptr()) for tensor in tensors]
    kept = _kept.get(weights[0])
    # The same tensors, not others where they lay.
    same = kept is not None and kept[1] == now and all(one() is two for one, two in zip(kept[0], tensors, strict=True))
    if kept is None or not same:
        kept = _kept[weights[0]] = ([TensorWeakRef(tensor) for tensor in tensors], now, {})
    found: dict[object, list[Step]] = kept[2]
    key = (x.shape, x.dtype, x.device, addend is None, tuple(layer.geometry), layer.activation, layer.pool, tf32())
    steps = found.get(key)
    if steps is None:
        steps = _prepared(x, addend, layer)
        # While a graph is recorded nothing is measured, and what is packed belongs to the graph.
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return steps
        if x.is_cuda:  # what was packed is there for other streams too
            torch.cuda.current_stream(x.device).synchronize()
        if len(found) >= MANY:
            found.clear()
        found[key] = steps
    return steps


def _prepared(x: Tensor, addend: Tensor | None, layer: Layer) -> list[Step]:
    """Computes all but the last stage on the way, for what is measured is measured on the maps themselves."""
    weights = list(layer.weights)
    steps: list[Step] = []
    number = 0
    while number < len(weights):
        # A 1 x 1 layer goes with the convolution before it.
        ends = number + 1 if _goes_along(weights, layer.geometry, number + 1) else number
        final = ends == len(weights) - 1
        if not final:
            weights[ends], weights[ends + 1] = aligned(weights[ends], weights[ends + 1])
        own, geometry = weights[number : ends + 1], layer.geometry[6 * number : 6 * number + 6]
        if final:
            return steps + _stage_steps(x, addend, layer._replace(weights=own, geometry=geometry))
        more = _stage_steps(x, None, Layer(own, None, geometry, "none", False))
        for step in more:
            x = step(x, None)
        steps += more
        number = ends + 1
    return steps


def _stage_steps(x: Tensor, addend: Tensor | None, layer: Layer) -> list[Step]:
    """One stage, one convolution or the 1 x 1 layer behind it too, the fastest way there is."""
    weight, second = layer.weights[0], layer.weights[1] if len(layer.weights) > 1 else None
    bias = layer.bias
    numbers = [int(number) for number in layer.geometry]
    images, channels, high, wide = x.shape
    stage = Stage(
        dtype=x.dtype,
        images=images,
        size=(high, wide),
        channels=channels,
        rank=weight.shape[0],
        filters=None if second is None else second.shape[0],
        kernel=(weight.shape[2], weight.shape[3]),
        stride=(numbers[0], numbers[1]),
        padding=(numbers[2], numbers[3]),
        dilation=(numbers[4], numbers[5]),
        bias=bias is not None,
        addend=addend is not None,
        activation=layer.activation,
        pool=layer.pool,
    )
    if layer.pool and (addend is not None or any(size % 2 for size in stage.out_size)):
        # Windows do not fill the map, or the addend is larger than what is written.
        apart = _stage_steps(x, addend, layer._replace(pool=False))
        return [*apart, lambda y, _: F.max_pool2d(y, 2)]
    outputs = (images, stage.outputs, *stage.out_size)

    def whole(added: Tensor | None) -> Tensor | None:
        """As large as what it is added to. A stage in the middle is given the layer's addend too, and has no use."""
        if added is None or not stage.addend or added.shape == outputs:
            return added if stage.addend else None
        return added.expand(outputs).contiguous(memory_format=torch.channels_last)

    if images == 0 or min(stage.out_size) < 1:  # nothing to measure; or torch will say what is wrong
        plan = EAGER
    else:
        plan = choose(stage, x.device, lambda plan: run(stage, plan, x, weight, second, bias, whole(addend)))
    if plan.form == "eager":
        # Not the weights themselves: kept beside the first of them, they would keep it alive.
        first = weight.detach()
        then, added_to = (None if one is None else one.detach() for one in (second, bias))

        def eagerly(y: Tensor, added: Tensor | None) -> Tensor:
            answer = run_eagerly(stage, y, first, then, added_to, whole(added))
            return answer.contiguous(memory_format=torch.channels_last)

        return [eagerly]
    launch = prepare(stage, plan, weight, second, bias)

    def launched(y: Tensor, added: Tensor | None) -> Tensor:
        out = empty(stage, y)
        if out.numel():
            launch(y, whole(added), out)
        return out

    return [launched]


def _goes_along(weights: Sequence[Tensor], geometry: Sequence[int], number: int) -> bool:
    if number >= len(weights) or weights[number].shape[2:] != (1, 1) or up(weights[number - 1].shape[0], 16) > WIDEST:
        return False
    return list(geometry[6 * number : 6 * number + 4]) == [1, 1, 0, 0]
