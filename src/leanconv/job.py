"""One run of ``accelerate``: find sites, choose ranks, solve layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import Batches, to_device
from leanconv.calibrate.responses import Probe, Responses, collect
from leanconv.entrance import copied
from leanconv.errors import LeanconvError, listing
from leanconv.fit import channel_spectrum, fit_site, measure, split_factors
from leanconv.network import reasons
from leanconv.network.failure import model_failed
from leanconv.network.fold import folded
from leanconv.network.links import Link, find_links, join
from leanconv.network.replace import Change, replace
from leanconv.network.replaceable import replaceable
from leanconv.network.sites import Site, Survey
from leanconv.network.skip import apply_skip, in_order
from leanconv.network.source import identify
from leanconv.network.survey import survey
from leanconv.network.trial import Trial
from leanconv.options import Options
from leanconv.progress import Progress
from leanconv.ranks import Candidate, Choice, Pairs, Plan, active, by_hand, macs_after, reachable, select_merged
from leanconv.ranks.candidates import Energies
from leanconv.result import Accelerated, LayerReport
from leanconv.solve import SpatialBasis, SpatialFactors, spatial_basis


@dataclass
class Job:
    """One run. ``original`` and ``accelerated`` are the two streams, both copies of the user's model."""

    original: nn.Module
    accelerated: nn.Module
    batches: Batches
    survey: Survey
    sites: dict[str, Site]
    skipped: dict[str, str]
    links: list[Link]
    options: Options
    device: torch.device
    dtype: torch.dtype
    reporter: Progress
    buffers: dict[str, Tensor]  # as the user gave them: running a network may change some

    @classmethod
    def prepare(
        cls, model: nn.Module, batches: Batches, options: Options, device: torch.device, reporter: Progress
    ) -> Job:
        original = copied(model).eval().to(device)
        buffers = {name: buffer.clone() for name, buffer in original.named_buffers()}
        sample = to_device(batches.sample(), device)
        try:
            found = survey(original, sample, layers=options.layers)
        except LeanconvError:
            raise
        except Exception as error:
            raise model_failed(error, batches.sample()) from error
        if not found.layers:
            raise LeanconvError("the model ran no convolution on these images; there is nothing to accelerate.")
        skipped = dict(found.skipped)
        trial = Trial(original, sample)
        sites = {site.name: site for site in replaceable(trial, list(found.sites))}
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
            accelerated=copied(original),
            batches=batches,
            survey=found,
            sites=sites,
            skipped=skipped,
            links=find_links(trial, list(sites.values())) if options.scheme != "spatial" else [],
            options=options,
            device=device,
            dtype=torch.float64 if double else torch.float32,
            reporter=reporter,
            buffers=buffers,
        )

    @property
    def fixed_macs(self) -> int:
        """MACs of the layers that are counted but are no sites."""
        return self.survey.macs - sum(site.cost.dense for site in self.sites.values())

    def reachable(self) -> float:
        """The largest speed-up there is."""
        candidates = [Candidate(name=s.name, geometry=s.geometry, cost=s.cost) for s in self.sites.values()]
        return reachable(candidates, self._pairs(), fixed=self.fixed_macs, scheme=self.options.scheme)

    def _pairs(self) -> Pairs:
        return [(link.giver.name, link.taker.name) for link in self.links]

    def run(self, home: torch.device) -> Accelerated:
        plan: Plan | None = None
        pairs = self._pairs()
        if isinstance(self.options.ranks, Mapping):
            geometries = {name: site.geometry for name, site in self.sites.items()}
            plan = by_hand(self.options.ranks, geometries, self.skipped, self.options.scheme)
            for name in [name for name in self.sites if name not in plan]:
                del self.sites[name]
                self.skipped[name] = reasons.NOT_NAMED
            pairs = active(plan, [pair for pair in pairs if pair[1] in plan])
        dense = {name: Probe(site, *folded(self.original, site, self.dtype)) for name, site in self.sites.items()}
        targets = self._responses(self.original, list(dense.values()), "original network")
        candidates, bases = self._candidates(dense, targets)
        if plan is None:
            assert not isinstance(self.options.ranks, Mapping)
            plan, pairs = select_merged(
                list(candidates.values()),
                pairs,
                fixed=self.fixed_macs,
                speedup=self.options.speedup,
                scheme=self.options.scheme,
                method=self.options.ranks,
            )
        macs = macs_after(candidates, plan, pairs)
        takers = self._drop_dense(plan, pairs, targets)
        splits = {
            name: bases[name].split(choice.ranks[0]) for name, choice in plan.items() if choice.scheme != "channel"
        }
        # The filters a site is fitted with: its own, or the product of their spatial split.
        probes = {
            name: Probe(site, splits[name].product(), dense[name].bias) if name in splits else dense[name]
            for name, site in self.sites.items()
        }
        solve = self._split if self.options.scheme == "spatial" else self._solve
        errors = solve(plan, targets, probes, splits)
        errors |= self._measure([dense[name] for name in takers], targets)
        changes = {name: self._change(site, plan[name]) for name, site in self.sites.items()}
        changes |= {name: _taking(site) for name, site in takers.items()}
        for giver, taker in sorted(pairs, key=lambda pair: self.sites[pair[0]].index):
            changes[giver], changes[taker] = join(self.accelerated, changes[giver], changes[taker])
        given = {taker: plan[giver].ranks[-1:] for giver, taker in pairs}
        reports = [
            LayerReport(
                name=name,
                scheme=changes[name].scheme,
                ranks=plan[name].ranks if name in plan else given[name],
                macs_before=site.cost.dense,
                macs_after=macs[name],
                energy=candidates[name].energy(plan[name]) if name in plan else 1.0,
                error=errors[name],
            )
            for name, site in sorted((self.sites | takers).items(), key=lambda item: item[1].index)
        ]
        before = self.survey.macs
        _restore(self.accelerated, self.buffers)
        saved = sum(report.macs_before - report.macs_after for report in reports)
        return Accelerated(
            model=self.accelerated.eval().to(home),
            layers=reports,
            skipped=in_order(self.skipped, self.survey),
            macs_before=before,
            macs_after=before - saved,
            parameters_before=_parameters(self.original),
            parameters_after=_parameters(self.accelerated),
            images=self.batches.images,
            changes=list(changes.values()),
            options=self.options,
            source=identify(self.original),
        )

    def _responses(self, stream: nn.Module, probes: list[Probe], title: str) -> dict[str, Responses]:
        with self.reporter.stage(title, len(self.batches.items)) as stage:
            return self._collect(stream, probes, stage.advance)

    def _collect(self, stream: nn.Module, probes: list[Probe], step: Callable[[], None]) -> dict[str, Responses]:
        return collect(
            stream,
            self.batches,
            probes,
            samples=self.options.samples,
            seed=self.options.seed,
            device=self.device,
            step=step,
        )

    def _candidates(
        self, dense: dict[str, Probe], targets: dict[str, Responses]
    ) -> tuple[dict[str, Candidate], dict[str, SpatialBasis]]:
        """The spectra ranks are chosen by."""
        candidates: dict[str, Candidate] = {}
        bases: dict[str, SpatialBasis] = {}
        for name, site in self.sites.items():
            spatial = channel = None
            if self.options.scheme != "channel" and site.geometry.splits_spatially:
                bases[name] = spatial_basis(dense[name].weight)
                spatial = Energies(bases[name].values.tolist())
            if self.options.scheme != "spatial":
                channel = Energies(channel_spectrum(dense[name], targets[name]).tolist())
            candidates[name] = Candidate(
                name=name, geometry=site.geometry, cost=site.cost, channel=channel, spatial=spatial
            )
        return candidates, bases

    def _drop_dense(self, plan: Plan, pairs: Pairs, targets: dict[str, Responses]) -> dict[str, Site]:
        """Forget the sites that stay dense, except those that will take in a factor; these are returned."""
        takers: dict[str, Site] = {}
        for name in [name for name in self.sites if name not in plan]:
            site = self.sites.pop(name)
            if any(name == taker for _, taker in pairs):
                takers[name] = site
                continue
            del targets[name]
            if self.options.scheme == "spatial" and not site.geometry.splits_spatially:
                self.skipped[name] = reasons.NOT_SPATIAL
            elif site.cost.channel(1) >= site.cost.dense:
                self.skipped[name] = reasons.NOT_CHEAPER
            else:
                self.skipped[name] = reasons.NOT_NEEDED
        return takers

    def _measure(self, probes: list[Probe], targets: dict[str, Responses]) -> dict[str, float]:
        """Errors of ``probes`` in the accelerated network as it stands."""
        if not probes:
            return {}
        seen = self._responses(self.accelerated, probes, "measuring")
        return {
            probe.site.name: measure(probe.site, targets[probe.site.name], seen[probe.site.name]) for probe in probes
        }

    def _split(
        self,
        plan: Plan,
        targets: dict[str, Responses],
        probes: dict[str, Probe],
        splits: dict[str, SpatialFactors],
    ) -> dict[str, float]:
        """The spatial scheme: nothing to fit. Errors are measured in the network as it ends up."""
        for name, site in self.sites.items():
            replace(self.accelerated, self._change(site, plan[name]), split_factors(probes[name], splits[name]))
        return self._measure(list(probes.values()), targets)

    def _solve(
        self,
        plan: Plan,
        targets: dict[str, Responses],
        probes: dict[str, Probe],
        splits: dict[str, SpatialFactors],
    ) -> dict[str, float]:
        """Every site, shallow to deep; the error of each.

        Asymmetric: a site's inputs come from the accelerated network as it stands when its turn comes. Symmetric:
        from the original, all at once.
        """
        options = self.options
        errors: dict[str, float] = {}
        steps = len(self.sites) * (len(self.batches.items) + 1) if options.asymmetric else len(self.sites)
        inputs = targets
        if splits and not options.asymmetric:
            inputs = self._responses(self.original, list(probes.values()), "split filters")
        with self.reporter.stage("solving", steps) as stage:
            for number, (name, site) in enumerate(self.sites.items(), 1):
                choice = plan[name]
                if options.asymmetric:
                    given = self._collect(self.accelerated, [probes[name]], stage.advance)[name]
                else:
                    given = inputs[name]
                if len(given.y) != len(targets[name].y):
                    raise LeanconvError(
                        f"layer {name!r} ran on other positions once the layers before it were accelerated: what this "
                        "network runs depends on the data; name that layer in skip."
                    )
                fit = fit_site(
                    probes[name],
                    choice,
                    splits.get(name),
                    target=targets[name],
                    given=given,
                    solver=options.solver,
                )
                replace(self.accelerated, self._change(site, choice), fit.factors)
                errors[name] = fit.error
                del targets[name]
                stage.advance()
                ranks = " x ".join(str(rank) for rank in choice.ranks)
                stage.label(f"{number}/{len(self.sites)} {name} {choice.scheme} rank {ranks}")
        return errors

    def _change(self, site: Site, choice: Choice) -> Change:
        return Change(
            name=site.name,
            scheme=choice.scheme,
            ranks=choice.ranks,
            geometry=site.geometry,
            batch_norm=site.batch_norm,
        )


def _taking(site: Site) -> Change:
    """A layer that stays whole but for the inputs it will take over; its batch norm stays where it is."""
    return Change(name=site.name, scheme="merged", ranks=(), geometry=site.geometry)


def _restore(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name in buffers and buffer.shape == buffers[name].shape:
            buffer.copy_(buffers[name])


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
