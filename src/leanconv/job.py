"""One run of ``accelerate``: find sites, choose ranks, solve layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import Batches, to_device
from leanconv.calibrate.responses import Probe, Responses, collect
from leanconv.entrance import copied
from leanconv.errors import LeanconvError, listing, unknown_name
from leanconv.fit import fit_site, measure, split_factors
from leanconv.network import reasons
from leanconv.network.failure import model_failed
from leanconv.network.fold import folded
from leanconv.network.replace import Change, replace
from leanconv.network.replaceable import replaceable
from leanconv.network.sites import Site, Survey
from leanconv.network.source import identify
from leanconv.network.survey import survey
from leanconv.options import Options
from leanconv.progress import Progress
from leanconv.ranks import Candidate, Choice, Plan, by_hand, reachable, select
from leanconv.ranks.candidates import Energies
from leanconv.result import Accelerated, LayerReport
from leanconv.solve import SpatialBasis, SpatialFactors, spatial_basis, spectrum


@dataclass
class Job:
    """One run. ``original`` and ``accelerated`` are the two streams, both copies of the user's model."""

    original: nn.Module
    accelerated: nn.Module
    batches: Batches
    survey: Survey
    sites: dict[str, Site]
    skipped: dict[str, str]
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
        sites = {site.name: site for site in replaceable(original, list(found.sites), sample)}
        skipped |= {site.name: reasons.NOT_AT_PATH for site in found.sites if site.name not in sites}
        _apply_skip(options, found, sites, skipped)
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
        return reachable(candidates, fixed=self.fixed_macs, scheme=self.options.scheme)

    def run(self, home: torch.device) -> Accelerated:
        plan: Plan | None = None
        if isinstance(self.options.ranks, Mapping):
            geometries = {name: site.geometry for name, site in self.sites.items()}
            plan = by_hand(self.options.ranks, geometries, self.skipped, self.options.scheme)
            for name in [name for name in self.sites if name not in plan]:
                del self.sites[name]
                self.skipped[name] = reasons.NOT_NAMED
        dense = {name: Probe(site, *folded(self.original, site, self.dtype)) for name, site in self.sites.items()}
        targets = self._responses(self.original, list(dense.values()), "original network")
        candidates, bases = self._candidates(dense, targets)
        if plan is None:
            assert not isinstance(self.options.ranks, Mapping)
            plan = select(
                list(candidates.values()),
                fixed=self.fixed_macs,
                speedup=self.options.speedup,
                scheme=self.options.scheme,
                method=self.options.ranks,
            )
        self._drop_dense(plan, targets)
        splits = {
            name: bases[name].split(choice.ranks[0]) for name, choice in plan.items() if choice.scheme != "channel"
        }
        # The filters a site is fitted with: its own, or the product of their spatial split.
        probes = {
            name: Probe(site, splits[name].product() if name in splits else dense[name].weight, dense[name].bias)
            for name, site in self.sites.items()
        }
        solve = self._split if self.options.scheme == "spatial" else self._solve
        errors = solve(plan, targets, probes, splits)
        reports = [
            LayerReport(
                name=name,
                scheme=plan[name].scheme,
                ranks=plan[name].ranks,
                macs_before=site.cost.dense,
                macs_after=candidates[name].macs(plan[name]),
                energy=candidates[name].energy(plan[name]),
                error=errors[name],
            )
            for name, site in sorted(self.sites.items(), key=lambda item: item[1].index)
        ]
        changes = [self._change(site, plan[name]) for name, site in self.sites.items()]
        before = self.survey.macs
        _restore(self.accelerated, self.buffers)
        saved = sum(report.macs_before - report.macs_after for report in reports)
        return Accelerated(
            model=self.accelerated.to(home),
            layers=reports,
            skipped=_in_order(self.skipped, self.survey),
            macs_before=before,
            macs_after=before - saved,
            parameters_before=_parameters(self.original),
            parameters_after=_parameters(self.accelerated),
            images=self.batches.images,
            changes=changes,
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
                groups = site.geometry.groups  # one rank for all: the r-th values of the groups go together
                values = torch.stack([spectrum(part) for part in targets[name].y.chunk(groups, 1)]).sum(0)
                channel = Energies(values[: site.geometry.channel_limit].tolist())
            candidates[name] = Candidate(
                name=name, geometry=site.geometry, cost=site.cost, channel=channel, spatial=spatial
            )
        return candidates, bases

    def _drop_dense(self, plan: Plan, targets: dict[str, Responses]) -> None:
        for name in [name for name in self.sites if name not in plan]:
            site = self.sites.pop(name)
            del targets[name]
            if self.options.scheme == "spatial" and not site.geometry.splits_spatially:
                self.skipped[name] = reasons.NOT_SPATIAL
            elif site.cost.channel(1) >= site.cost.dense:
                self.skipped[name] = reasons.NOT_CHEAPER
            else:
                self.skipped[name] = reasons.NOT_NEEDED

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
        seen = self._responses(self.accelerated, list(probes.values()), "measuring")
        return {name: measure(site, targets[name], seen[name]) for name, site in self.sites.items()}

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


def _apply_skip(options: Options, found: Survey, sites: dict[str, Site], skipped: dict[str, str]) -> None:
    known = [layer.name for layer in found.layers]
    if options.skip is None:
        by_hand_names = options.ranks if isinstance(options.ranks, Mapping) else ()
        first = next((layer.name for layer in found.layers if layer.type != "Linear"), None)
        if first in sites and first not in by_hand_names:
            del sites[first]
            skipped[first] = reasons.FIRST
        return
    for name in options.skip:
        if name not in known and name not in skipped:
            raise unknown_name(name, known, what="layer", where="skip")
        if sites.pop(name, None) is not None:
            skipped[name] = reasons.ASKED


def _in_order(skipped: dict[str, str], found: Survey) -> dict[str, str]:
    order = {layer.name: number for number, layer in enumerate(found.layers)}
    return dict(sorted(skipped.items(), key=lambda item: order.get(item[0], len(order))))


def _restore(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name in buffers and buffer.shape == buffers[name].shape:
            buffer.copy_(buffers[name])


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
