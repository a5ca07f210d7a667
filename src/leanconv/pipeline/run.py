"""One run of ``accelerate``: find sites, choose ranks, solve layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from dataclasses import replace as with_changes
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import to_device
from leanconv.calibrate.probes import Probe
from leanconv.calibrate.samples import Samples
from leanconv.config import Options
from leanconv.errors import LeanconvError, listing, unknown_name
from leanconv.network import reasons
from leanconv.network.dry_run import Trial
from leanconv.network.fold import Filters
from leanconv.network.links import Link, find_links, join
from leanconv.network.recognise import is_norm_with_activation
from leanconv.network.replace import Change
from leanconv.network.replaceable import replaceable
from leanconv.network.sites import Site, Survey, apply_skip, in_order, warn_of_linear_fits
from leanconv.network.source import identify
from leanconv.network.survey import survey
from leanconv.network.user_model import copied, device_of, model_failed, parse_device
from leanconv.pipeline.engine import Engine
from leanconv.pipeline.solve_layers import Solving, change_of
from leanconv.pipeline.spatial_als import swept_splits
from leanconv.ranks import Candidate, Pairs, Plan, active, by_hand, log_energy, macs_after, reachable, select_merged
from leanconv.ranks.by_sensitivity import Felt, least_change
from leanconv.ranks.latency import final_times, refuse, timed_plan
from leanconv.ranks.select import Merit
from leanconv.ranks.sensitivity import feel
from leanconv.ranks.spectra import Spectra
from leanconv.result import Accelerated, LayerReport
from leanconv.runtimes.target import Target
from leanconv.solve import SpatialFactors


@dataclass
class Job:
    """One run. ``original`` is a copy of the user's model, ``filters`` those of its sites."""

    original: nn.Module
    filters: Filters
    survey: Survey
    sites: dict[str, Site]
    skipped: dict[str, str]
    links: list[Link]
    options: Options
    device: torch.device
    dtype: torch.dtype
    buffers: dict[str, Tensor]  # as the user gave them: running a network may change some
    target: Target | None = None  # what is timed, with its device

    @classmethod
    def prepare(
        cls,
        model: nn.Module,
        sample: Any,
        options: Options,
        device: torch.device,
        real: Mapping[str, int] | None = None,
    ) -> Job:
        """Look at the network on a ``sample`` of the images, and refuse what cannot be done, before long work.

        ``real``: MACs of layers, where what is looked at is not quite what the network does.
        """
        target = options.target
        if target is not None:
            target = with_changes(target, device=str(parse_device(target.device or device_of(model))))
            refuse(model, sample, target)
        original = copied(model).eval().to(device)
        buffers = {name: buffer.clone() for name, buffer in original.named_buffers()}
        inputs = to_device(sample, device)
        try:
            found = survey(original, inputs, layers=options.layers)
        except LeanconvError:
            raise
        except Exception as error:
            raise model_failed(error, sample) from error
        if real is not None:
            found = found.counted_as(real)
        if options.part is not None:
            found = _within(found, original, options.part)
        if not found.layers:
            raise LeanconvError("the model ran no convolution on these images; there is nothing to accelerate.")
        skipped = dict(found.skipped)
        trial = Trial(original, inputs)
        sites = {site.name: site for site in replaceable(trial, list(found.sites))}
        if options.ranks == "sensitivity" and not trial.tells:
            raise LeanconvError(
                "ranks='sensitivity' compares outputs, and this network returns no floating-point tensors; use "
                "ranks='energy'."
            )
        skipped |= {site.name: reasons.NOT_AT_PATH for site in found.sites if site.name not in sites}
        named = options.ranks if isinstance(options.ranks, Mapping) else ()
        apply_skip(options.skip, found, sites, skipped, named=named)
        if not sites:
            raise LeanconvError(
                f"no layer is left to accelerate ({listing([f'{n}: {why}' for n, why in skipped.items()], 3)}); give a "
                "network with convolutions leanconv can replace, or skip fewer."
            )
        double = any(parameter.dtype == torch.float64 for parameter in original.parameters())
        return cls(
            original=original,
            filters=trial.filters,
            survey=found,
            sites=sites,
            skipped=skipped,
            links=find_links(trial, list(sites.values())) if options.form != "spatial" else [],
            options=options,
            device=device,
            dtype=torch.float64 if double else torch.float32,
            buffers=buffers,
            target=target,
        )

    @property
    def fixed_macs(self) -> int:
        """MACs of the layers that are counted but are no sites."""
        return self.survey.macs - sum(site.cost.dense for site in self.sites.values())

    def reachable(self) -> float:
        """The largest speed-up there is."""
        candidates = [Candidate(name=s.name, geometry=s.geometry, cost=s.cost) for s in self.sites.values()]
        return reachable(candidates, self._pairs(), fixed=self.fixed_macs, scheme=self.options.form)

    def _pairs(self) -> Pairs:
        return [(link.giver.name, link.taker.name) for link in self.links]

    def run(self, engine: Engine) -> Accelerated:
        plan, pairs, spectra = self._plan(engine)
        kept = engine.team.share(spectra.kept(self._pairs(), self.survey) if engine.team.lead else None)
        macs = macs_after(spectra.candidates, plan, pairs)
        with engine.clock.stage("solving"):
            splits = self._splits(engine, plan, spectra)
        energies = engine.team.share({name: spectra.candidates[name].energy(plan[name]) for name in plan})
        takers = self._drop_dense(plan, pairs, spectra.targets)
        # The filters a site is fitted with: its own, or the product of their spatial split.
        probes = {
            name: self._split_probe(site, splits[name], spectra.dense[name].bias)
            if name in splits
            else spectra.dense[name]
            for name, site in self.sites.items()
        }
        if engine.team.lead and self.options.solver == "nonlinear" and self.options.form != "spatial":
            warn_of_linear_fits(self.sites.values())
        solving = Solving(
            engine=engine,
            plan=plan,
            targets=spectra.targets,
            dense=spectra.dense,
            probes=probes,
            splits=splits,
            takers={name: spectra.dense[name] for name in takers},
        )
        outcomes = solving.run()
        spectra.targets.close()
        changes = {name: change_of(site, plan[name]) for name, site in self.sites.items()}
        changes |= {name: _taking(site) for name, site in takers.items()}
        for giver, taker in sorted(pairs, key=lambda pair: self.sites[pair[0]].index):
            changes[giver], changes[taker] = join(engine.accelerated, changes[giver], changes[taker])
        given = {taker: plan[giver].ranks[-1:] for giver, taker in pairs}
        reports = [
            LayerReport(
                name=name,
                scheme=changes[name].scheme,
                ranks=plan[name].ranks if name in plan else given[name],
                macs_before=site.cost.dense,
                macs_after=macs[name],
                energy=energies.get(name, 1.0),
                **asdict(outcomes[name]),
            )
            for name, site in sorted((self.sites | takers).items(), key=lambda item: item[1].index)
        ]
        _restore(engine.accelerated, self.buffers)
        saved = sum(report.macs_before - report.macs_after for report in reports)
        return Accelerated(
            model=engine.accelerated.eval(),
            layers=reports,
            skipped=in_order(self.skipped, self.survey),
            macs_before=self.survey.macs,
            macs_after=self.survey.macs - saved,
            parameters_before=_parameters(self.original),
            parameters_after=_parameters(engine.accelerated),
            images=engine.images,
            changes=list(changes.values()),
            options=self.options,
            source=identify(self.original),
            seconds=engine.clock.seconds,
            spectra=kept,
            timing=final_times(engine, self.target),
        )

    def _plan(self, engine: Engine) -> tuple[Plan, Pairs, Spectra]:
        """The ranks of every site, from the statistics of the original network or as given by hand."""
        plan: Plan | None = None
        pairs = self._pairs()
        if isinstance(self.options.ranks, Mapping):
            geometries = {name: site.geometry for name, site in self.sites.items()}
            plan = by_hand(self.options.ranks, geometries, self.skipped, self.options.form)
            for name in [name for name in self.sites if name not in plan]:
                del self.sites[name]
                self.skipped[name] = reasons.NOT_NAMED
            pairs = active(plan, [pair for pair in pairs if pair[1] in plan])
        dense = {name: self._dense_probe(site) for name, site in self.sites.items()}
        engine.look(list(dense.values()))
        targets = engine.targets(list(dense.values()))
        with engine.clock.stage("statistics"), engine.reporter.stage("statistics", len(dense)) as stage:
            spectra = Spectra(dense, targets, self.options.form, engine.work)
            if engine.team.lead:
                spectra.measure(stage.advance)
        felt: dict[str, Felt] = {}
        if self.options.ranks == "sensitivity" and engine.team.lead:
            with engine.clock.stage("measuring layers"):
                felt = feel(engine, spectra)
        with engine.clock.stage("choosing ranks"):
            if plan is None and engine.team.lead:
                plan, pairs = self._selected(engine, spectra, pairs, felt)
            plan, pairs = engine.team.share((plan, pairs))
        assert plan is not None
        return plan, pairs, spectra

    def _selected(self, engine: Engine, spectra: Spectra, pairs: Pairs, felt: dict[str, Felt]) -> tuple[Plan, Pairs]:
        """A plan, and the pairs of layers to merge. ``felt``: for ranks="sensitivity"."""
        method, candidates = self.options.ranks, list(spectra.candidates.values())
        assert isinstance(method, str)
        if method == "latency":
            return timed_plan(engine, self.target, self.sites, candidates, pairs, lambda p: self._changes(p, pairs))
        with engine.reporter.stage("choosing ranks", 0):
            return select_merged(
                candidates,
                pairs,
                fixed=self.fixed_macs,
                speedup=self.options.speedup,
                scheme=self.options.form,
                method=method,
                merit=self._least_change(felt) if method == "sensitivity" else log_energy,
            )

    def _least_change(self, felt: dict[str, Felt]) -> Merit:
        return least_change(felt, refits=self.options.asymmetric and self.options.form != "spatial")

    def _changes(self, plan: Plan, pairs: Pairs) -> list[Change]:
        """What a plan does to the layers, those that only take in a factor included."""
        taking = {taker for _, taker in active(plan, pairs)}
        return [
            change_of(site, plan[name]) if name in plan else _taking(site)
            for name, site in self.sites.items()
            if name in plan or name in taking
        ]

    def _split_probe(self, site: Site, split: SpatialFactors, bias: Tensor) -> Probe:
        """With refinement the horizontal filters are fitted to what they see, where that is more than d numbers: else
        mixtures of the d old ones are all the filters there are."""
        wide = split.horizontal[0].numel() > site.geometry.out_channels and site.geometry.groups == 1
        halfway = wide and self.options.free_filters
        return Probe(site, split.product(), bias, split, halfway=halfway)

    def _splits(self, engine: Engine, plan: Plan, spectra: Spectra) -> dict[str, SpatialFactors]:
        """The lead's spatial factors: another machine may round its eigenvectors elsewhere."""
        splits: dict[str, SpatialFactors] | None = None
        if engine.team.lead:
            splits = {name: spectra.split(name, c.ranks[0]) for name, c in plan.items() if c.scheme != "channel"}
            if self.options.sweeps:
                splits |= swept_splits(engine, spectra.dense, splits, self.options.sweeps)
        return engine.team.share(splits)

    def _dense_probe(self, site: Site) -> Probe:
        weight, bias = self.filters.of(site, self.dtype)
        # Half precision rounds outputs; a norm that brings its activation along does not show the response.
        exact = self.original.get_submodule(site.name).weight.dtype == self.dtype
        shown = site.batch_norm is None or not is_norm_with_activation(self.original.get_submodule(site.batch_norm))
        return Probe(site, weight, bias, own_output=exact and shown)

    def _drop_dense(self, plan: Plan, pairs: Pairs, targets: Samples) -> dict[str, Site]:
        """Forget the sites that stay dense, except those that will take in a factor; these are returned."""
        takers: dict[str, Site] = {}
        for name in [name for name in self.sites if name not in plan]:
            site = self.sites.pop(name)
            if any(name == taker for _, taker in pairs):
                takers[name] = site
                continue
            targets.drop(name)
            if self.options.form == "spatial" and not site.geometry.splits_spatially:
                self.skipped[name] = reasons.NOT_SPATIAL
            elif site.cost.channel(1) >= site.cost.dense:
                self.skipped[name] = reasons.NOT_CHEAPER
            else:
                self.skipped[name] = reasons.NOT_NEEDED
        return takers


def _within(found: Survey, model: nn.Module, part: str) -> Survey:
    paths = [path for path, _ in model.named_modules() if path]
    if part not in paths:
        raise unknown_name(part, paths, what="module", where="part")
    inside = found.within(part)
    if not inside.layers:
        raise LeanconvError(f"no layer of part={part!r} ran on these images; give another part, or none.")
    return inside


def _taking(site: Site) -> Change:
    """A layer that stays whole but for the inputs it will take over; its batch norm stays where it is."""
    return Change(name=site.name, scheme="merged", ranks=(), geometry=site.geometry)


def _restore(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name in buffers and buffer.shape == buffers[name].shape:
            buffer.copy_(buffers[name])


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
