"""From a plan to weights: every site fitted in its turn and put into the accelerated network."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as with_changes

from leanconv.calibrate.probes import Probe, Responses
from leanconv.calibrate.samples import Samples
from leanconv.errors import LeanconvError
from leanconv.forms.fit import Fit, Outcome, fit_site, measure, samples_needed, split_factors
from leanconv.network.replace import Change, Factors, replace
from leanconv.network.sites import Site
from leanconv.pipeline.engine import Engine
from leanconv.progress import Solved
from leanconv.ranks import Choice, Plan
from leanconv.solve import Parts, SpatialFactors, parted, thinned


@dataclass
class Solving:
    """The sites of a plan, one by one, from responses to weights in the accelerated network."""

    engine: Engine
    plan: Plan
    targets: Samples
    dense: dict[str, Probe]  # of the original's filters
    probes: dict[str, Probe]  # of the filters a site is fitted with
    splits: dict[str, SpatialFactors]  # what those are the product of, where they are one
    takers: dict[str, Probe]  # of layers that stay whole and will take in a factor

    def run(self) -> dict[str, Outcome]:
        """How well every site and taker does."""
        options = self.engine.options
        if options.form == "spatial":
            return self._split()
        if not options.asymmetric:
            return self._symmetric() | {name: Outcome(error) for name, error in self._measured(self.takers).items()}
        wanted = self.probes | self.takers
        return self.engine.solve(
            wanted,
            list(self.dense.values()),
            self.targets,
            solve=self._fit,
            put=self._put,
            describe=self._describe,
        )

    def _split(self) -> dict[str, Outcome]:
        """The spatial scheme: nothing to fit. Errors are measured in the network as it ends up."""
        with self.engine.reporter.stage("solving", len(self.probes)) as stage:
            for name, probe in self.probes.items():
                stage.advance()
                self._put(name, split_factors(probe))
        return {name: Outcome(error) for name, error in self._measured(self.probes).items()}

    def _symmetric(self) -> dict[str, Outcome]:
        """Every site fitted to the original's inputs."""
        engine, done = self.engine, self.engine.restored()
        todo = [probe for name, probe in self.probes.items() if name not in done]
        inputs = self.targets
        if self.splits and todo:
            inputs = engine.responses(engine.original, todo, "split filters")
        with engine.reporter.stage("solving", len(self.probes)) as stage:
            for number, name in enumerate(self.probes, 1):
                if name not in done:
                    fit: Fit | None = None
                    if engine.team.lead:
                        with engine.clock.stage("solving"):
                            target = self.targets.get(name)
                            fit = self._fit(name, target, target if inputs is self.targets else inputs.get(name))
                            self.targets.drop(name)
                            inputs.drop(name)
                    done[name] = engine.kept(number, name, fit)
                self._put(name, done[name].factors)
                stage.advance()
                stage.solved(self._describe(name, done[name].outcome.error), number, len(self.probes))
        return {name: fit.outcome for name, fit in done.items()}

    def _measured(self, probes: dict[str, Probe]) -> dict[str, float]:
        """Errors of ``probes`` in the accelerated network as it stands."""
        if not probes:
            return {}
        seen = self.engine.responses(self.engine.accelerated, list(probes.values()), "measuring")
        errors: dict[str, float] = {}
        if self.engine.team.lead:
            with self.engine.reporter.stage("errors", len(probes)) as stage:
                for number, (name, probe) in enumerate(probes.items(), 1):
                    errors[name] = measure(probe.site, self.targets.get(name), seen.get(name))
                    stage.advance()
                    stage.solved(self._describe(name, errors[name]), number, len(probes))
        return self.engine.team.share(errors)

    def _fit(self, name: str, target: Responses, given: Responses) -> Fit:
        probe = self.probes.get(name)
        if len(given.y) != len(target.y):
            raise LeanconvError(
                f"layer {name!r} ran on other positions once the layers before it were accelerated: what this "
                "network runs depends on the data; name that layer in skip."
            )
        if probe is None:  # it only takes in the factor of another
            return Fit(Factors((), target.y.new_empty(0)), Outcome(measure(self.takers[name].site, target, given)))
        options, choice, enough = self.engine.options, self.plan[name], None
        alike, parts = self._alike(probe, len(target.y)), self._parts(probe, len(target.y))
        if options.samples == "auto" and parts is not None:
            target, given, parts, enough = self._thinned(probe, choice, target, given, parts)
        # Which rows an image has must be known for sure: else they depend on how the images were cut into batches.
        held_out = parts if options.closed_form and alike else None
        fit = fit_site(
            probe, choice, self.splits.get(name), target=target, given=given, solver=options.solver, parts=held_out
        )
        # Who has chosen the number has looked at several: that counts for more than an extrapolation from one.
        return fit if enough is None else Fit(fit.factors, with_changes(fit.outcome, enough=enough, needed=None))

    def _thinned(
        self, probe: Probe, choice: Choice, target: Responses, given: Responses, parts: Parts
    ) -> tuple[Responses, Responses, Parts, bool | None]:
        """As many of the samples as the site needs, and whether there were enough."""
        rows, solver = len(target.y), self.engine.options.solver
        needed = samples_needed(probe, choice, target=target, given=given, solver=solver, parts=parts)
        if needed is None:
            return target, given, parts, None
        if needed.rows == rows:
            return target, given, parts, needed.enough
        kept = thinned(rows, needed.rows).to(target.y.device)
        few = target.at(kept)
        return few, few if given is target else given.at(kept), parts.at(kept, rows), needed.enough

    def _parts(self, probe: Probe, rows: int) -> Parts | None:
        """None for a layer that runs on several maps: its rows are in their order, not in that of the images."""
        if probe.site.calls > 1:
            return None
        return parted(rows, self.engine.images, alike=self._alike(probe, rows))

    def _alike(self, probe: Probe, rows: int) -> bool:
        """Whether every image has equally many rows."""
        return rows == self.engine.images * self.engine.positions.count(probe.site.positions)

    def _put(self, name: str, factors: Factors) -> None:
        if name in self.plan:
            replace(self.engine.accelerated, change_of(self.probes[name].site, self.plan[name]), factors)

    def _describe(self, name: str, error: float | None) -> Solved:
        if name not in self.plan:
            return Solved(name, "whole", (), error)
        return Solved(name, self.plan[name].scheme, self.plan[name].ranks, error)


def change_of(site: Site, choice: Choice) -> Change:
    return Change(
        name=site.name,
        scheme=choice.scheme,
        ranks=choice.ranks,
        geometry=site.geometry,
        batch_norm=site.batch_norm,
    )
