"""Which filters can go: those whose maps only one other convolution looks at, channel by channel.

Found by doing it: many filters of the one layer and the other's weights for them are taken away. If the network answers
as it does with all filters and zeros for those weights, nothing but that layer looks at them, and nothing in between
mixes channels, counts them or knows them by their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from leanconv.network.fold import without_norm
from leanconv.network.replace import Factors, dense_modules, filled
from leanconv.network.sites import Site
from leanconv.network.trial import Trial


@dataclass(frozen=True)
class Pair:
    """``taker`` is all that looks at the maps of ``giver``."""

    giver: Site
    taker: Site


def prunable(trial: Trial, sites: Sequence[Site]) -> list[Pair]:
    """Pairs among layers that follow each other. Two runs where all of them hold, two more a pair where they do not."""
    if not trial.tells:
        return []
    there = sorted((site for site in sites if _plain(site)), key=lambda site: site.index)
    pairs = [
        Pair(giver, taker)
        for giver, taker in pairwise(there)
        if not giver.adds and 1 < giver.geometry.out_channels == taker.geometry.in_channels
    ]
    if not pairs or _hold(trial, pairs):
        return pairs
    return [pair for pair in pairs if _hold(trial, [pair])]


def _plain(site: Site) -> bool:
    geometry = site.geometry
    return geometry.kind == "conv2d" and geometry.groups == 1 and site.calls == 1 and not geometry.pads_apart


def _hold(trial: Trial, pairs: list[Pair]) -> bool:
    outputs = {pair.giver.name: _some(pair) for pair in pairs}
    inputs = {pair.taker.name: _some(pair) for pair in pairs}
    sites = {site.name: site for pair in pairs for site in (pair.giver, pair.taker)}
    kept: dict[str, nn.Module] = {}
    gone: dict[str, nn.Module] = {}
    for name, site in sites.items():
        old = trial.model.get_submodule(site.name).weight
        assert isinstance(old, Tensor)
        weight, bias = trial.filters.of(site, old.dtype)
        every = [torch.ones(size, dtype=torch.bool) for size in weight.shape[:2]]
        rows, columns = outputs.get(name, every[0]).to(weight.device), inputs.get(name, every[1]).to(weight.device)
        zeros = weight * columns.to(weight.dtype).reshape(-1, *[1] * (weight.dim() - 2))
        kept[name] = _layer(site, zeros, bias, old)
        gone[name] = _layer(site, weight[rows][:, columns], bias[rows], old)
        if site.batch_norm is not None:
            kept[site.batch_norm] = gone[site.batch_norm] = without_norm(trial.model.get_submodule(site.batch_norm))
    return trial.alike(kept, gone, list(sites))


def _some(pair: Pair) -> Tensor:
    """Which of the filters stay: every second, and not the first or the last, so that no other has its old number."""
    count = pair.giver.geometry.out_channels
    stay = torch.arange(count) % 2 == 1
    stay[-1] = count == 2
    return stay


def _layer(site: Site, weight: Tensor, bias: Tensor, old: Tensor) -> nn.Module:
    geometry = replace(site.geometry, out_channels=weight.shape[0], in_channels=weight.shape[1])
    return filled(lambda: dense_modules(geometry), Factors((weight,), bias), old)
