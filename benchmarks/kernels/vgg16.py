"""VGG-16's convolutions at 4x: the networks and their single layers, for ``benchmarks.kernels.run``."""

from __future__ import annotations

import functools
import math
from dataclasses import replace as with_changes
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.vgg import cfgs, make_layers

from leanconv.forms import CHANNEL, THREE_D
from leanconv.forms.replace import Change, replace
from leanconv.kernels.fused_stage import Stage
from leanconv.network.layers.geometry import Cost
from leanconv.network.layers.kinds import geometry_of
from leanconv.network.layers.modules import Factored
from leanconv.system.text_table import table

# d' of conv1_2 .. conv5_3 at 4x, as chosen from ImageNet (the paper's are close).
RANKS = (11, 28, 29, 59, 51, 55, 113, 85, 87, 213, 206, 198)
# What an H200 can do at most: multiply-accumulates in half precision, and bytes to and from memory, a second.
MACS, BYTES = 989e12 / 2, 4.8e12


@functools.cache
def networks(scheme: str) -> tuple[nn.Module, nn.Module, float]:
    """VGG-16's convolutions as they are and factorised, and the MACs of the one over the other's."""
    torch.manual_seed(0)
    original, accelerated = (make_layers(cfgs["D"]).eval().requires_grad_(False) for _ in range(2))
    before, after, size = 0, 0, 224
    ranks = iter(RANKS)
    for number, module in enumerate(original):
        if isinstance(module, nn.MaxPool2d):
            size //= 2
        if not isinstance(module, nn.Conv2d):
            continue
        geometry = geometry_of(module)
        cost = Cost.of(geometry, (size, size), (size, size))
        before += cost.dense
        if number == 0:
            after += cost.dense
            continue
        rank = next(ranks)
        form, chosen, macs = CHANNEL, (rank,), CHANNEL.macs(cost, (rank,))
        if scheme == THREE_D.name:
            form = THREE_D
            chosen = next((r, r) for r in range(rank * 3, 0, -1) if THREE_D.macs(cost, (r, r)) <= macs)
        after += form.macs(cost, chosen)
        replace(accelerated, Change(name=str(number), form=form, ranks=chosen, geometry=geometry))
    for module in accelerated.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    return original, accelerated.eval().requires_grad_(False), before / after


def vgg16_stages(batch: int) -> list[tuple[str, Stage, Stage]]:
    """Name, the layer as it was and as it is at 4x; where a pooling follows, with it."""
    found = []
    size, channels, ranks = 224, 3, iter(RANKS)
    for block, (filters, layers) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), 1):
        for layer in range(1, layers + 1):
            same: dict[str, Any] = {
                "dtype": torch.bfloat16,
                "images": batch,
                "size": (size, size),
                "channels": channels,
                "kernel": (3, 3),
                "stride": (1, 1),
                "padding": (1, 1),
                "dilation": (1, 1),
                "bias": True,
                "addend": False,
                "activation": "relu",
                "pool": layer == layers,
            }
            dense = Stage(rank=filters, filters=None, **same)
            first = (block, layer) == (1, 1)
            low = dense if first else Stage(rank=next(ranks), filters=filters, **same)
            found.append((f"conv{block}_{layer}", dense, low))
            channels = filters
        size //= 2
    return found


def spatial_ranks() -> list[tuple[int, ...]]:
    """(d'', d') of the 3d form of conv1_2 .. conv5_3."""
    rows = [module for module in networks("3d")[1] if isinstance(module, Factored)]
    return [(row.vertical.out_channels, row.horizontal.out_channels) for row in rows]  # type: ignore[union-attr]


def spatial_stages(batch: int) -> list[Stage]:
    """Both stages of every layer in 3d form."""
    found = []
    for (_, _, low), (vertical, horizontal) in zip(vgg16_stages(batch)[1:], spatial_ranks(), strict=True):
        bare = {"filters": None, "bias": False, "activation": "none", "pool": False}
        found.append(with_changes(low, rank=vertical, kernel=(3, 1), padding=(1, 0), **bare))
        found.append(with_changes(low, channels=vertical, rank=horizontal, kernel=(1, 3), padding=(0, 1)))
    return found


def tensors(stage: Stage) -> tuple[Tensor, Tensor, Tensor | None, Tensor, None]:
    def last(*shape: int) -> Tensor:
        values = torch.randn(shape, device="cuda", dtype=stage.dtype) / math.prod(shape[1:]) ** 0.5
        return values.contiguous(memory_format=torch.channels_last)

    x = torch.randn(stage.images, stage.channels, *stage.size, device="cuda", dtype=stage.dtype)
    second = None if stage.filters is None else last(stage.filters, stage.rank, 1, 1)
    bias = torch.zeros(stage.outputs, device="cuda", dtype=stage.dtype)
    return (
        x.contiguous(memory_format=torch.channels_last),
        last(stage.rank, stage.channels, *stage.kernel),
        second,
        bias,
        None,
    )


def limit(stage: Stage) -> float:
    """Seconds no kernel can beat: the products at full speed, or the map in, the weights and the map out once."""
    taps = stage.channels * math.prod(stage.kernel)
    macs = stage.positions * (taps * stage.rank + stage.rank * (stage.filters or 0))
    size = stage.dtype.itemsize
    moved = stage.images * stage.channels * math.prod(stage.size) + math.prod(stage.out_shape)
    weights = taps * stage.rank + stage.rank * (stage.filters or 0)
    return max(macs / MACS, size * (moved + weights) / BYTES)


def print_limits() -> None:
    """What an H200 could do at most, layer by layer; needs no GPU."""
    rows = []
    for batch in (64, 1):
        for name, dense, low in vgg16_stages(batch):
            columns = low.columns if low.filters is not None else low.rank
            rows.append(
                [f"{name} b{batch}", f"{low.channels}-{low.rank}-{low.filters}", str(columns)]
                + [f"{1e6 * limit(stage):.1f}" for stage in (dense, low)]
            )
    print(table(["layer", "c-d'-d", "columns", "original us", "at 4x us"], rows))
    print("MACs before / after:", *(f"{scheme} {networks(scheme)[2]:.2f}x" for scheme in ("channel", "3d")))
