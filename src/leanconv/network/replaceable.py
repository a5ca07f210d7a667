"""Which layers can really be replaced: a trial on the sample, since a network may do anything with its modules.

It may hold a layer in a plain list, read its attributes, ask for its type, or use a convolution's raw output behind
the back of the batch norm that would be folded away. So the trial puts in place what replacing would, with nothing
approximated yet, and compares the network's answers.
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

    One extra run when all is well, up to two a site when it is not.
    """
    if not trial.tells:
        # Nothing to compare: do only what cannot change a value.
        sites = [_unfolded(site) for site in sites]
    if _survive(trial, sites):
        return sites
    kept: list[Site] = []
    for site in sites:
        for candidate in [site, _unfolded(site)] if site.batch_norm else [site]:
            if _survive(trial, [candidate]):
                kept.append(candidate)
                break
    # What each of many layers may do to the last bits adds up.
    return kept if _survive(trial, kept, leniency=10.0) else []


def _unfolded(site: Site) -> Site:
    """Without its batch norm the response is what goes into the norm, and nothing is known of what follows."""
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
    """A plain layer that does the site's work, its batch norm included."""
    old = filters.model.get_submodule(site.name).weight
    assert isinstance(old, Tensor)
    weight, bias = filters.of(site, old.dtype)
    return filled(lambda: dense_modules(site.geometry), Factors((weight,), bias), old)
