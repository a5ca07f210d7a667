"""Muon: momentum made orthogonal (K. Jordan et al., 2024), with steps measured by the size of the weights.

The gradient of a layer's filters, a matrix G of outputs x (inputs x window), is dominated by few directions: those in
which the layer's input varies most. Adam weighs single numbers and leaves that so; here every direction moves alike:

    M <- b M + (1 - b) G,    G' = (1 - b) G + b M,    U = (G' G'^T)^(-1/2) G',    W <- W - lr ||W|| U / sqrt(r),

r the smaller side of W: a step changes a layer's weights by about ``lr`` of their size, whatever that is, or less where
the gradient has fewer directions than r. Layers fitted to pixels and to features of any scale take the same rate. It
gets further than Adam in as many steps (benchmarks/ablation/optimizers.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
# x -> a x + b x^3 + c x^5, five times: any singular value from 0.01 to 1 comes to lie between 0.68 and 1.14.
ROUNDS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Of matrices of filters, outputs x the rest; ``dtype`` is that of the products that make them orthogonal."""

    def __init__(
        self,
        filters: Iterable[Any],
        lr: float,
        *,
        weight_decay: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(list(filters), {"lr": lr, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            filters = [weights for weights in group["params"] if weights.grad is not None]
            if not filters:
                continue
            gradients = [weights.grad for weights in filters]
            momenta = [self._momentum(weights) for weights in filters]
            torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
            ahead = torch._foreach_lerp(gradients, momenta, MOMENTUM)
            sizes = torch._foreach_norm(filters)
            if group["weight_decay"]:
                torch._foreach_mul_(filters, 1 - group["lr"] * group["weight_decay"])
            for weights, gradient, toward, size in zip(filters, gradients, ahead, sizes, strict=True):
                direction = orthogonal(toward.reshape(len(toward), -1).to(self._dtype or toward.dtype))
                length = min(direction.shape) ** 0.5  # of a matrix whose singular values are one
                # Steps do not get smaller with the momentum: a layer without a gradient would drift on for ever.
                step = size * gradient.any() * (-group["lr"] / length)
                weights.add_(direction.reshape(weights.shape).to(weights.dtype) * step)

    def _momentum(self, weights: Tensor) -> Tensor:
        state = self.state[weights]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weights)
        momentum: Tensor = state["momentum"]
        return momentum


def orthogonal(matrix: Tensor) -> Tensor:
    """(M M^T)^(-1/2) M, roughly: the singular vectors stay, every singular value comes near one."""
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    # In two steps, as squares of small numbers are nothing; a matrix of zeros stays one.
    x = x / x.abs().amax().clamp_min(torch.finfo(x.dtype).smallest_normal)
    x = x / torch.linalg.vector_norm(x).clamp_min(1.0)
    for _ in range(ROUNDS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)  # few launches
    made: Tensor = x.T if matrix.shape[0] > matrix.shape[1] else x
    return made
