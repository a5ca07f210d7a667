"""Jaderberg's data reconstruction: spatial pairs whose responses, not filters, are close to those of the layers.

``leanconv.accelerate(..., scheme="spatial")`` splits filters by their weights alone; ``train_spatial_pairs`` trains the
pairs of its result, one by one, to the original's responses. Slow, and only here to be compared with.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import leanconv
from leanconv import LeanconvError
from leanconv.solve import SpatialFactors

STEPS, BATCH = 600, 512
# Share of the factors' own size by which they may change in a step; falls to zero along half a cosine.
RATE = 0.02
# Bytes of patches a layer is fitted to, at most.
PATCHES = 256 << 20


@dataclass(frozen=True)
class Reconstruction:
    """``errors``: mean squared distance from the targets, at the start and at the end."""

    factors: SpatialFactors
    bias: Tensor
    errors: tuple[float, float]


def reconstruct(
    patches: Tensor, target: Tensor, start: SpatialFactors, bias: Tensor, *, steps: int = STEPS, seed: int = 0
) -> Reconstruction:
    """min over V (r x c x kh), H (d x r x kw), b: sum ||t_i - H V x_i - b||^2, by stochastic gradient descent.

    ``patches`` x: n x c x kh x kw, ``target`` t: n x d. Steps of Adam on batches of 512 from ``start``, whose factors
    are of one size; the better of start and end is returned. Cost a step: 3 x 512 r (c kh kw + d kw) multiply-adds.
    """
    vertical = start.first[..., 0].detach().clone().requires_grad_()
    horizontal = start.second[:, :, 0].detach().clone().requires_grad_()
    offset = bias.detach().clone().requires_grad_()
    size = float(vertical.detach().square().mean().sqrt())
    optimizer = torch.optim.Adam([vertical, horizontal, offset], lr=RATE * size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)

    def squared(x: Tensor, t: Tensor) -> Tensor:
        columns = torch.einsum("ncij,rci->nrj", x, vertical)
        return (torch.einsum("nrj,drj->nd", columns, horizontal) + offset - t).square().sum(1)

    @torch.no_grad()
    def error() -> float:
        parts = zip(patches.split(4096), target.split(4096), strict=True)
        return float(torch.stack([squared(x, t).double().sum() for x, t in parts]).sum()) / max(1, len(patches))

    before = error()
    for _ in range(steps):
        chosen = torch.randint(len(patches), (BATCH,), generator=generator).to(patches.device)
        optimizer.zero_grad()
        squared(patches[chosen], target[chosen]).mean().backward()
        optimizer.step()
        schedule.step()
    after = error()
    if not after < before:
        return Reconstruction(start, bias, (before, before))
    factors = SpatialFactors(vertical.detach()[..., None].contiguous(), horizontal.detach()[:, :, None].contiguous())
    return Reconstruction(factors, offset.detach(), (before, after))


def train_spatial_pairs(
    original: nn.Module,
    result: leanconv.Accelerated,
    images: Tensor | Iterable[Tensor],
    *,
    samples: int = 50_000,
    seed: int = 0,
) -> nn.Module:
    """A copy of ``result.model`` in which every spatial pair is trained to what its layer answers in ``original``.

    ``result``: of ``accelerate(original, ..., scheme="spatial")``. ``images``: batches the network takes. A layer is
    fitted to at most ``samples`` of its positions, spread over the images, and to at most 256 MB of patches.
    """
    batches = list(images.split(50) if isinstance(images, Tensor) else images)
    network = copy.deepcopy(result.model)
    for change in result.changes:
        layer = original.get_submodule(change.name)
        # A batch norm is folded into the pair, so that the pair answers for both.
        last = layer if change.batch_norm is None else original.get_submodule(change.batch_norm)
        pair = [module for module in network.get_submodule(change.name).modules() if isinstance(module, nn.Conv2d)]
        if len(pair) != 2 or not isinstance(layer, nn.Conv2d) or not (last is layer or type(last) is nn.BatchNorm2d):
            raise LeanconvError(
                f"layer {change.name!r} is no plain Conv2d that was split into a k x 1 and a 1 x k; give a result of "
                "scheme='spatial', and name that layer in skip."
            )
        patches, target = patches_and_responses(original, layer, last, batches, samples=samples, seed=seed)
        vertical, horizontal = pair
        start = SpatialFactors(vertical.weight.detach(), horizontal.weight.detach())
        assert horizontal.bias is not None
        with torch.enable_grad():
            fitted = reconstruct(patches, target, start, horizontal.bias.detach(), seed=seed)
        with torch.no_grad():
            vertical.weight.copy_(fitted.factors.first)
            horizontal.weight.copy_(fitted.factors.second)
            horizontal.bias.copy_(fitted.bias)
    return network


class _Stop(Exception):
    """What lies behind the layer is of no interest."""


@torch.no_grad()
def patches_and_responses(
    network: nn.Module, layer: nn.Conv2d, last: nn.Module, batches: list[Tensor], *, samples: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Inputs of ``layer`` at some positions, n x c x kh x kw, and what ``last`` answers there, n x d."""
    count = sum(map(len, batches))
    most = max(1, min(samples, PATCHES // (layer.weight[0].numel() * layer.weight.element_size())))
    every = -(-count // most)  # only every so many-th image, where there are more images than patches
    each = max(1, most * every // count)
    generator = torch.Generator().manual_seed(seed)
    seen: dict[str, Tensor] = {}
    patches, responses = [], []

    def take_input(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen["x"] = inputs[0]

    def take_output(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        seen["y"] = output
        raise _Stop

    handles = [layer.register_forward_pre_hook(take_input), last.register_forward_hook(take_output)]
    try:
        first = 0
        for batch in batches:
            try:
                network(batch.to(layer.weight.device))
            except _Stop:
                windows = windows_of(seen["x"], layer)
                for number in range(-first % every, len(batch), every):
                    y = seen["y"][number].flatten(1)
                    at = torch.randperm(y.shape[1], generator=generator)[:each].to(y.device)
                    width = windows.shape[3]
                    patches.append(windows[number][:, at // width, at % width].transpose(0, 1))
                    responses.append(y[:, at].T)
            first += len(batch)
    finally:
        for handle in handles:
            handle.remove()
    if not patches:
        raise LeanconvError("a layer did not run on these images; name it in skip.")
    return torch.cat(patches), torch.cat(responses)


def windows_of(x: Tensor, layer: nn.Conv2d) -> Tensor:
    """What the filters see, N x c x height x width x kh x kw (height x width of the output); no copy is made."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode)
    reach = [d * (k - 1) + 1 for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
    windows = x.unfold(2, reach[0], layer.stride[0]).unfold(3, reach[1], layer.stride[1])
    return windows[..., :: layer.dilation[0], :: layer.dilation[1]]
