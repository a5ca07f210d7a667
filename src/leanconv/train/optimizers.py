"""Muon, and which optimizer moves which weights.

Muon is momentum made orthogonal (K. Jordan et al., 2024), with steps measured by the size of the weights.

The gradient of a layer's filters, a matrix G of outputs x (inputs x window), is dominated by few directions: those in
which the layer's input varies most. Adam scales single numbers and leaves that so; here every direction moves alike:

    M <- b M + (1 - b) G,    G' = (1 - b) G + b M,    U = (G' G'^T)^(-1/2) G',    W <- W - lr ||W|| U / sqrt(r),

r the smaller side of W: a step changes a layer's weights by about ``lr`` of their size, whatever that is, or less where
the gradient has fewer directions than r. Layers fitted to pixels and to features of any scale take the same rate. It
gets further than Adam in as many steps (benchmarks/ablation/optimizers.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.network.layers.kinds import REPLACEABLE
from leanconv.train.settings import Optimizer

MOMENTUM = 0.95
# x -> a x + b x^3 + c x^5, five times: a singular value from 0.01 to 1 becomes one between 0.68 and 1.14.
ROUNDS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
# Adam's rate beside Muon, as a share of Muon's: that one is in parts of the weights, Adam's in their own units.
SHARE = 0.1


class Muon(torch.optim.Optimizer):
    """For filters, outputs x the rest. ``dtype``: of the matrix products that make a step orthogonal."""

    def __init__(
        self, filters: Iterable[Any], lr: float, *, weight_decay: float = 0.0, dtype: torch.dtype | None = None
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
                length = min(direction.shape) ** 0.5  # the norm of a matrix whose singular values are one
                # A step is as long for a small momentum: without a gradient a layer would drift on for ever.
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
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    # In two steps, as the squares of small numbers would be zero; a matrix of zeros stays one.
    x = x / x.abs().amax().clamp_min(torch.finfo(x.dtype).smallest_normal)
    x = x / torch.linalg.vector_norm(x).clamp_min(1.0)
    for _ in range(ROUNDS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)  # few launches
    return x.T if tall else x


def optimizers(
    model: nn.Module, kind: Optimizer, lr: float, device: torch.device, *, weight_decay: float = 0.0, bf16: bool = False
) -> list[torch.optim.Optimizer]:
    """For the weights of ``model`` that are trained. The rate of a parameter group is its ``share`` of ``lr``.
    ``bf16``: whether the network runs in mixed precision."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if kind == "sgd":
        return [torch.optim.SGD([{"params": trained, "share": 1.0}], lr=lr, momentum=0.9, weight_decay=weight_decay)]
    filters = _filters(model) if kind == "muon" else []
    ids = set(map(id, filters))
    rest = [parameter for parameter in trained if id(parameter) not in ids]
    result: list[torch.optim.Optimizer] = []
    if filters:
        # Half precision is enough for a direction, and on a GPU that has it the products are almost free.
        dtype = torch.bfloat16 if bf16 and device.type == "cuda" else None
        result.append(Muon([{"params": filters, "share": 1.0}], lr, weight_decay=weight_decay, dtype=dtype))
    if rest:
        group = {"params": rest, "share": SHARE if kind == "muon" else 1.0}
        gpu = device.type == "cuda"  # there it is one kernel, and a CUDA graph can record it
        result.append(torch.optim.AdamW([group], lr=lr, weight_decay=weight_decay, fused=gpu or None, capturable=gpu))
    return result


def takes_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its rate may be a tensor on the device, which a recorded step reads anew every time."""
    return isinstance(optimizer, Muon | torch.optim.AdamW)


def set_rate(optimizer: torch.optim.Optimizer, rate: float, device: torch.device) -> None:
    """``rate``: of all weights; a parameter group takes its share."""
    for group in optimizer.param_groups:
        own = rate * group["share"]
        if device.type != "cuda" or not takes_tensors(optimizer):
            group["lr"] = own
        elif isinstance(group["lr"], Tensor) and group["lr"].is_cuda:
            group["lr"].fill_(own)
        else:
            group["lr"] = torch.tensor(own, device=device)


def _filters(model: nn.Module) -> list[nn.Parameter]:
    """Weights that are one matrix, each once. Grouped filters are many small matrices. Weights that are all zero would
    stay zero: Muon's step is a share of their size."""
    filters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None) if isinstance(module, REPLACEABLE) else None
        if not isinstance(weight, nn.Parameter) or not weight.requires_grad or getattr(module, "groups", 1) > 1:
            continue
        if bool(weight.detach().any()):
            filters[id(weight)] = weight
    return list(filters.values())
