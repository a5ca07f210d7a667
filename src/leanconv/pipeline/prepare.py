"""Looking at a network on two images: what can be replaced in it, and what cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import to_device
from leanconv.calibrate.probes import Probe
from leanconv.config import Options
from leanconv.errors import LeanconvError, listing, unknown_name
from leanconv.network import reasons
from leanconv.network.dry_run import Trial, replaceable
from leanconv.network.fold import Filters
from leanconv.network.links import find_links
from leanconv.network.recognise import is_norm_with_activation
from leanconv.network.sites import Site, Survey, apply_skip
from leanconv.network.survey import survey
from leanconv.network.user_model import copied, model_failed
from leanconv.ranks import Candidate, Pairs, Problem
from leanconv.ranks.selector import RankSelector


@dataclass
class Prepared:
    """A copy of the user's network (``original``), its layers, and those of them that can be replaced (``sites``)."""

    original: nn.Module
    filters: Filters
    survey: Survey
    sites: dict[str, Site]
    skipped: dict[str, str]
    pairs: Pairs  # of sites that may be merged
    options: Options
    selector: RankSelector | None  # None for ranks by hand
    dtype: torch.dtype
    comparable: bool  # whether the network returns floating-point tensors
    buffers: dict[str, Tensor]  # as the user gave them: running a network may change some

    @property
    def fixed_macs(self) -> int:
        """MACs of the layers that are counted but are no sites."""
        return self.survey.macs - sum(site.cost.dense for site in self.sites.values())

    def reachable(self) -> float:
        """The largest possible speed-up."""
        candidates = tuple(Candidate(name=s.name, geometry=s.geometry, cost=s.cost) for s in self.sites.values())
        scheme, fixed = self.options.forms, self.fixed_macs
        return Problem(scheme=scheme, candidates=candidates, pairs=self.pairs, fixed=fixed).reachable

    def keep_only(self, names: Mapping[str, Any]) -> None:
        """Leave the sites that are not among ``names`` as they are."""
        for name in [name for name in self.sites if name not in names]:
            del self.sites[name]
            self.skipped[name] = reasons.NOT_NAMED

    def not_chosen(self, site: Site) -> str:
        """Why a plan leaves the site as it is."""
        forms = self.options.forms.applicable(site.geometry)
        if not forms:
            return reasons.NOT_SPATIAL
        cheaper = any(form.macs(site.cost, (1,) * len(form.axes)) < site.cost.dense for form in forms)
        return reasons.NOT_NEEDED if cheaper else reasons.NOT_CHEAPER

    def probe(self, site: Site) -> Probe:
        """Of the original's filters."""
        weight, bias = self.filters.of(site, self.dtype)
        # Half precision rounds outputs; a norm that brings its activation along does not show the response.
        exact = self.original.get_submodule(site.name).weight.dtype == self.dtype
        shown = site.batch_norm is None or not is_norm_with_activation(self.original.get_submodule(site.batch_norm))
        return Probe(site, weight, bias, own_output=exact and shown)


def prepare(
    model: nn.Module, sample: Any, options: Options, device: torch.device, real: Mapping[str, int] | None = None
) -> Prepared:
    """Look at the network on a ``sample`` of the images, and refuse what cannot be done, before long work.

    ``real``: MACs of layers, where what is looked at is not quite what the network does.
    """
    original = copied(model).eval().to(device)
    buffers = {name: buffer.clone() for name, buffer in original.named_buffers()}
    seen = survey_on(original, sample, device, options.layers, real)
    if options.part is not None:
        seen = _within(seen, original, options.part)
    if not seen.layers:
        raise LeanconvError("the model ran no convolution on these images; there is nothing to accelerate.")
    trial = Trial(original, to_device(sample, device))
    sites = {site.name: site for site in replaceable(trial, list(seen.sites))}
    by_hand = isinstance(options.ranks, Mapping)
    selector = None if by_hand else options.selector.prepared(model, sample, comparable=trial.comparable)
    skipped = dict(seen.skipped)
    skipped |= {site.name: reasons.NOT_AT_PATH for site in seen.sites if site.name not in sites}
    apply_skip(options.skip, seen, sites, skipped, named=options.ranks if by_hand else ())
    if not sites:
        raise LeanconvError(
            f"no layer is left to accelerate ({listing([f'{n}: {why}' for n, why in skipped.items()], 3)}); give a "
            "network with convolutions leanconv can replace, or skip fewer."
        )
    double = any(parameter.dtype == torch.float64 for parameter in original.parameters())
    links = find_links(trial, list(sites.values())) if options.forms.merges else []
    return Prepared(
        original=original,
        filters=trial.filters,
        survey=seen,
        sites=sites,
        skipped=skipped,
        pairs=[(link.giver.name, link.taker.name) for link in links],
        options=options,
        selector=selector,
        dtype=torch.float64 if double else torch.float32,
        comparable=trial.comparable,
        buffers=buffers,
    )


def survey_on(
    network: nn.Module,
    sample: Any,
    device: torch.device,
    layers: Literal["conv", "all"],
    real: Mapping[str, int] | None,
) -> Survey:
    """The layers of a run on ``sample``, with their ``real`` MACs; an error of the network in one sentence."""
    try:
        return survey(network, to_device(sample, device), layers=layers).counted_as(real or {})
    except LeanconvError:
        raise
    except Exception as error:
        raise model_failed(error, sample) from error


def _within(seen: Survey, model: nn.Module, part: str) -> Survey:
    paths = [path for path, _ in model.named_modules() if path]
    if part not in paths:
        raise unknown_name(part, paths, what="module", where="part")
    inside = seen.within(part)
    if not inside.layers:
        raise LeanconvError(f"no layer of part={part!r} ran on these images; give another part, or none.")
    return inside
