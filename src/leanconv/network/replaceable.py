"""Which layers can really be replaced: a trial on the sample, since a network may do anything with its modules.

It may hold a layer in a plain list, read its attributes, ask for its type, or use a convolution's raw output beside
the batch norm that would be folded. So the trial puts exact stand-ins where factors would go and compares the
network's outputs.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from leanconv.network.activations import ActivationSpec
from leanconv.network.dry_run import Trial
from leanconv.network.effective_conv import is_plain
from leanconv.network.fold import Filters, without_norm
from leanconv.network.layers.modules import Factors, dense_modules, filled
from leanconv.network.sites import Site


def replaceable(trial: Trial, sites: list[Site]) -> list[Site]:
    """The sites that can be replaced, with batch norm folded where that is right too.

    One extra run if all can be replaced, up to two a site otherwise.
    """
    if not trial.tells:
        # Nothing to compare: fold no batch norm, so that no value can change.
        sites = [_unfolded(site) for site in sites]
    if _survive(trial, sites):
        return sites
    accepted: list[Site] = []
    for site in sites:
        for candidate in [site, _unfolded(site)] if site.batch_norm else [site]:
            if _survive(trial, [candidate]):
                accepted.append(candidate)
                break
    # Rounding of many layers adds up.
    return accepted if _survive(trial, accepted, leniency=10.0) else []


def _unfolded(site: Site) -> Site:
    """Without its batch norm folded the response is the input of the norm, with no activation behind it."""
    if site.batch_norm is None:
        return site
    return replace(site, batch_norm=None, activation=ActivationSpec(), adds=0, feeds=None)


def _survive(trial: Trial, sites: list[Site], leniency: float = 1.0) -> bool:
    stand_ins: dict[str, nn.Module] = {}
    for site in sites:
        layer = trial.model.get_submodule(site.name)
        plain = site.batch_norm is None and is_plain(layer)
        stand_ins[site.name] = layer if plain else dense_copy(trial.filters, site)
        if site.batch_norm is not None:
            stand_ins[site.batch_norm] = without_norm(trial.model.get_submodule(site.batch_norm))
    return trial.holds(stand_ins, [site.name for site in sites], leniency=leniency)


def dense_copy(filters: Filters, site: Site) -> nn.Sequential:
    """A plain layer that computes what the site does, its batch norm included."""
    old = filters.model.get_submodule(site.name).weight
    assert isinstance(old, Tensor)
    weight, bias = filters.of(site, old.dtype)
    return filled(lambda: dense_modules(site.geometry), Factors((weight,), bias), old)
