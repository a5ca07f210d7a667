"""Layers with nothing between them: the 1 x 1 factor of one is taken into the 1 x 1 filters of the next.

A *link* joins a site whose response goes, as it is, into one other site with 1 x 1 filters and nowhere else (the
narrow ends of MobileNet's blocks). Behind the factors P z + b of the first and the filters W of the second,

    W (P z + b) + c = (W P) z + (W b + c),

so P need not be applied: W P has r columns where W had d >= r. That is exact, and always cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from leanconv.network.dry_run import Trial
from leanconv.network.effective_conv import is_plain
from leanconv.network.layers.modules import Factors, dense_modules, filled
from leanconv.network.recognise import has_hooks
from leanconv.network.sites import Site


@dataclass(frozen=True)
class Link:
    giver: Site
    taker: Site


def find_links(trial: Trial, sites: list[Site]) -> list[Link]:
    """The links of a network that works with any number of channels between two layers."""
    by_name = {site.name: site for site in sites}
    links = [Link(site, by_name[site.feeds]) for site in sites if site.feeds in by_name]
    links = [link for link in links if _fits(trial.model, link) and not _watched(trial.model, link)]
    if not links or not trial.comparable or trial.opaque:
        return []
    if _survive(trial, links):
        return links
    links = [link for link in links if _survive(trial, [link])]
    return links if _survive(trial, links) else []


def _fits(model: nn.Module, link: Link) -> bool:
    giver, taker = link.giver.geometry, link.taker.geometry
    alike = giver.groups == taker.groups == 1 and giver.kind == taker.kind
    before, after = taker.margins(link.taker.in_size)
    padded = any(before) or any(after)
    return alike and max(taker.kernel) == 1 and not padded and is_plain(model.get_submodule(link.taker.name))


def _watched(model: nn.Module, link: Link) -> bool:
    """Whether a user's hook may see the tensor between the two: on a module that holds one and not the other."""

    def holders(path: str) -> set[str]:
        parts = path.split(".")
        return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}

    apart = holders(link.giver.tail) ^ holders(link.taker.name)
    return any(has_hooks(model.get_submodule(path)) for path in apart)


def _survive(trial: Trial, links: list[Link]) -> bool:
    """With twice the channels between them, of which the layer behind ignores the new ones, the network must give the
    same outputs; anything else that reads that tensor sees other numbers."""
    givers, takers = {link.giver.name for link in links}, {link.taker.name for link in links}
    sites = {site.name: site for link in links for site in (link.giver, link.taker)}

    def stand_in(site: Site) -> nn.Module:
        return _grown(trial.dense_copy(site), site, inwards=site.name in takers, outwards=site.name in givers)

    return trial.survives(list(sites.values()), stand_in)


def _grown(whole: nn.Sequential, site: Site, *, inwards: bool, outwards: bool) -> nn.Module:
    old = whole[-1]
    assert isinstance(old.weight, Tensor)
    assert isinstance(old.bias, Tensor)
    weight, bias = old.weight.detach(), old.bias.detach()
    if inwards:
        weight = torch.cat([weight, torch.zeros_like(weight)], 1)
    if outwards:
        weight, bias = torch.cat([weight, -2 * weight]), torch.cat([bias, torch.ones_like(bias)])
    geometry = replace(site.geometry, in_channels=weight.shape[1], out_channels=weight.shape[0])
    return filled(lambda: dense_modules(geometry), Factors((weight,), bias), old.weight)
