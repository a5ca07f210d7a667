"""Which filters can go: those whose maps only one other convolution looks at, channel by channel.

Found by a trial that takes nothing away: a few filters of the one layer are there twice, and the other's weights for
them are shared out over both. If the network answers as before, nothing but that layer looks at them, and nothing in
between mixes channels or counts them.
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

TWICE = 2  # filters


@dataclass(frozen=True)
class Pair:
    """``taker`` is all that looks at the maps of ``giver``."""

    giver: Site
    taker: Site


def prunable(trial: Trial, sites: Sequence[Site]) -> list[Pair]:
    """Pairs among layers that follow each other. One run where all of them hold, one more a pair where they do not."""
    if not trial.tells:
        return []
    there = sorted((site for site in sites if _plain(site)), key=lambda site: site.index)
    pairs = [
        Pair(giver, taker)
        for giver, taker in pairwise(there)
        if not giver.adds and giver.geometry.out_channels == taker.geometry.in_channels
    ]
    if not pairs or _hold(trial, pairs):
        return pairs
    return [pair for pair in pairs if _hold(trial, [pair])]


def _plain(site: Site) -> bool:
    geometry = site.geometry
    return geometry.kind == "conv2d" and geometry.groups == 1 and site.calls == 1 and not geometry.pads_apart


def _hold(trial: Trial, pairs: list[Pair]) -> bool:
    giving, taking = ({getattr(pair, end).name for pair in pairs} for end in ("giver", "taker"))
    sites = {site.name: site for pair in pairs for site in (pair.giver, pair.taker)}
    stand_ins: dict[str, nn.Module] = {}
    for name, site in sites.items():
        stand_ins[name] = _wider(trial, site, inputs=name in taking, outputs=name in giving)
        if site.batch_norm is not None:
            stand_ins[site.batch_norm] = without_norm(trial.model.get_submodule(site.batch_norm))
    return trial.holds(stand_ins, list(sites))


def _wider(trial: Trial, site: Site, *, inputs: bool, outputs: bool) -> nn.Module:
    """The layer with its first filters twice, and half the weight for each of two inputs that are the same."""
    old = trial.model.get_submodule(site.name).weight
    assert isinstance(old, Tensor)
    weight, bias = trial.filters.of(site, old.dtype)
    if inputs:
        half = weight[:, :TWICE] / 2
        weight = torch.cat([half, weight[:, TWICE:], half], 1)
    if outputs:
        weight, bias = torch.cat([weight, weight[:TWICE]]), torch.cat([bias, bias[:TWICE]])
    geometry = replace(site.geometry, out_channels=weight.shape[0], in_channels=weight.shape[1])
    return filled(lambda: dense_modules(geometry), Factors((weight,), bias), old)
