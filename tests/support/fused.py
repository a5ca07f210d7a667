"""Factored layers and operands of the fused operator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from leanconv.kernels.modules import BLOCKS, Fused
from leanconv.network.layers.modules import Factored

GEOMETRY = [2, 1, 1, 0, 1, 2]
ONE = [1, 1, 0, 0, 1, 1]


def operands(number: int, *, last: bool = False) -> tuple[object, ...]:
    g = torch.Generator().manual_seed(0)
    sizes = [(5, 16, 3, 3), (7, 5, 1, 1), (9, 7, 1, 1)][:number]
    weights = [torch.randn(size, generator=g) for size in sizes]
    x = torch.randn(2, 16, 12, 12, generator=g)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    return x, weights, torch.randn(sizes[-1][0], generator=g), None, [*GEOMETRY, *ONE * (number - 1)], "silu", True


def pair(c: int = 16, rank: int = 5, d: int = 24) -> Factored:
    modules = [("reduce", nn.Conv2d(c, rank, 3, padding=1, bias=False)), ("expand", nn.Conv2d(rank, d, 1))]
    return Factored(modules, (d, c, 3, 3))


def row(*following: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(pair(), *following).eval().requires_grad_(False)


@dataclass(frozen=True, kw_only=True)
class FusedLayer:
    """One fused layer: its path, and what else its last launch does."""

    name: str
    activation: str
    pooled: bool
    addend: bool


def fused_layers(model: nn.Module) -> list[FusedLayer]:
    """What ``optimize_`` fused. The last convolution of a fused residual block adds the shortcut."""
    blocks = [(path, block) for path, block in model.named_modules() if type(block) in BLOCKS.values()]
    adding = {f"{path}.conv3" if hasattr(block, "conv3") else f"{path}.conv2" for path, block in blocks}
    return [
        FusedLayer(name=name, activation=module.activation, pooled=module.pooled, addend=name in adding)
        for name, module in model.named_modules()
        if isinstance(module, Fused)
    ]
