"""What the kernels compute, in torch's own operations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from leanconv.kernels.fused_stage import ACTIVATIONS, Stage


def finish(x: Tensor, addend: Tensor | None, activation: str, pool: bool) -> Tensor:
    """What follows the convolutions: addend, activation, 2 x 2 max-pooling."""
    if addend is not None:
        x = x + addend
    x = ACTIVATIONS[activation](x)
    return F.max_pool2d(x, 2) if pool else x


def eager(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    addend: Tensor | None,
    geometry: Sequence[int],
    activation: str,
    pool: bool,
) -> Tensor:
    """Convolutions in a row and what follows them.

    ``weights``: of each convolution, d x c x kh x kw; ``bias`` is the last one's. ``geometry``: stride, padding and
    dilation of each, two numbers each. ``addend`` is added before the activation; ``pool``: the largest of every
    2 x 2 behind it.
    """
    numbers = list(geometry)
    for layer, weight in enumerate(weights):
        own_bias = bias if layer == len(weights) - 1 else None
        stride, padding, dilation = (numbers[start : start + 2] for start in range(6 * layer, 6 * layer + 6, 2))
        x = F.conv2d(x, weight, own_bias, stride, padding, dilation)
    return finish(x, addend, activation, pool)


def run_eagerly(
    stage: Stage, x: Tensor, weight: Tensor, second: Tensor | None, bias: Tensor | None, addend: Tensor | None
) -> Tensor:
    """One stage; ``weight`` and ``second`` as for ``launch.run``."""
    weights = [weight] if second is None else [weight, second]
    geometry = [*stage.stride, *stage.padding, *stage.dilation, 1, 1, 0, 0, 1, 1]
    return eager(x, weights, bias, addend, geometry, stage.activation, stage.pool)
