"""The stages of a run: a network and images are analyzed, ranks are planned, the plan is applied.

    analyze    look at the network, run it over the images, keep sampled responses and their spectra: the slow part
    plan       the form and ranks of every layer for a speed-up: cheap, again and again
    apply      fit every layer and put it into a copy of the network

``accelerate`` is exactly this chain. All stages of one run share a ``Session``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from leanconv.calibrate.gradients import Gradients
from leanconv.calibrate.streams import Streams
from leanconv.config import Options
from leanconv.errors import LeanconvError
from leanconv.forms import Choice, Choices
from leanconv.forms.replace import Change, join
from leanconv.network import reasons
from leanconv.network.reasons import by_reason
from leanconv.network.sites import in_order, warn_of_linear_fits
from leanconv.network.source import identify
from leanconv.network.torchvision_detectors import kind_of, seen_as_detector
from leanconv.network.user_model import copied, device_of
from leanconv.pipeline.images import Given, looked_at
from leanconv.pipeline.plan import Plan, read_plan
from leanconv.pipeline.prepare import Prepared
from leanconv.pipeline.session import Session
from leanconv.pipeline.size_up import size_up
from leanconv.pipeline.solve_layers import LayerState, Run, solve_layers, split_filters
from leanconv.ranks import Candidate, Pairs, active, by_hand
from leanconv.ranks.manual import checked
from leanconv.ranks.selector import RankSelector, Request
from leanconv.ranks.sensitivity.measure import measure_gradients
from leanconv.ranks.spectra import Spectra
from leanconv.result import Accelerated
from leanconv.system.text_table import table


class Analysis:
    """An analyzed network: its layers, the original's sampled responses and their spectra.

    ``plan`` and ``apply`` may be called any number of times. ``close`` it, or use it in a ``with`` block, to free its
    memory and its workdir.
    """

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        prepared: Prepared,
        streams: Streams,
        spectra: Spectra,
        options: Options,
        given: Given,
        *,
        last: bool,
    ):
        """``last``: see ``analyze_model``."""
        self._session, self._model, self._prepared = session, model, prepared
        self._streams, self._spectra, self._options, self._given = streams, spectra, options, given
        self._last, self._applied = last, False
        self._measured: Mapping[str, Gradients] | LeanconvError | None = None
        self._analyzed = dict(session.clock.seconds)
        # An analysis that nobody closes and nobody uses any more gives its workdir back too.
        weakref.finalize(self, session.close)

    def __enter__(self) -> Analysis:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._spectra.close()
        self._session.close()

    @property
    def layers(self) -> dict[str, Candidate]:
        """The layers that can be replaced, in the order they run: geometry, cost and spectra."""
        return dict(self._spectra.candidates)

    @property
    def skipped(self) -> dict[str, str]:
        """Every other layer that counts, and the reason."""
        return in_order(self._prepared.skipped, self._prepared.survey)

    @property
    def reachable(self) -> float:
        """The largest speed-up that can be planned, with every rank at 1."""
        return self._prepared.reachable()

    def __str__(self) -> str:
        total = self._prepared.survey.macs
        rows = [
            [
                name,
                " x ".join(map(str, one.geometry.kernel)),
                f"{one.geometry.in_channels} -> {one.geometry.out_channels}",
                f"{one.cost.dense / 1e6:.2f}",
                f"{100 * one.cost.dense / total:.1f}%",
            ]
            for name, one in self.layers.items()
        ]
        lines = [table(["layer", "kernel", "channels", "MMACs", "share"], rows, left=2)]
        lines += [f"as it is: {line}" for line in by_reason(self.skipped)]
        return "\n".join([*lines, f"up to {self.reachable:.2f}x fewer MACs of {total / 1e6:.1f} M"])

    def plan(
        self, speedup: float | str | Path | None = None, ranks: Any = None, *, asymmetric: bool | None = None
    ) -> Plan:
        """The form and ranks of every layer. Arguments as for ``accelerate``; ``speedup`` may also be the path of a
        plan that was saved. ``asymmetric``: whether layers will be fitted to the input they will have."""
        if isinstance(speedup, (str, Path)):
            choices, pairs = read_plan(Path(speedup))
            self._check(choices)
            return self._as_plan(choices, [pair for pair in self._prepared.pairs if pair in pairs], self._options)
        options = _asked(self._options, speedup=speedup, ranks=ranks, asymmetric=asymmetric)
        with self._session.guarded():
            plan = self._chosen(options)
        self._options = options
        return plan

    def apply(
        self, plan: Plan, *, solver: str | None = None, asymmetric: bool | None = None, refine: Any = None
    ) -> Accelerated:
        """The network with every layer of the plan replaced and fitted. Arguments as for ``accelerate``; without, those
        that the plan was made for."""
        options = _asked(plan.options, solver=solver, asymmetric=asymmetric, refine=refine)
        self._check(plan)
        with self._session.guarded():
            if options.refine == "distill" and self._options.refine != options.refine:
                self._check_distillable()
            result = self._applied_plan(plan, options)
            distills = options.refine == "distill"
            if not distills:
                result = self._checked(result, self._prepared.original, result.model)
            if kind_of(self._model) is not None:
                seen_as_detector(result.model)
            result.model.to(device_of(self._model))
            if self._last:
                self._session.travel.end()
            if distills:
                result = self._distilled(result, options)
                both = (copied(one).to(self._session.device) for one in (self._model, result.model))
                result = self._checked(result, *both)
            self._session.finish()
            self._session.clock.seconds = dict(self._analyzed)  # those so far belong to this result
        return result

    def _check(self, choices: Mapping[str, Choice]) -> None:
        for name, choice in choices.items():
            if name not in self._spectra.candidates:
                raise LeanconvError(f"the plan names layer {name!r}, which cannot be replaced in this network.")
            checked(name, choice, self._spectra.candidates[name].geometry)

    def _as_plan(self, choices: Choices, pairs: Pairs, options: Options, selector: RankSelector | None = None) -> Plan:
        candidates, fixed = self._spectra.candidates, self._prepared.fixed_macs
        return Plan(choices, pairs, candidates, fixed=fixed, options=options, selector=selector)

    def _chosen(self, options: Options) -> Plan:
        """By the selector, at the main process, or by hand."""
        prepared, streams, pairs = self._prepared, self._streams, self._prepared.pairs
        if isinstance(options.ranks, Mapping):
            geometries = {name: site.geometry for name, site in prepared.sites.items()}
            choices = by_hand(options.ranks, geometries, prepared.skipped, options.forms)
            return self._as_plan(choices, [pair for pair in pairs if pair[1] in choices], options)
        selector = prepared.selector
        if selector is None or options is not prepared.options:
            selector = options.selector.prepared(self._model, streams.batches.sample(), comparable=prepared.comparable)
        chosen: tuple[Choices, Pairs] | None = None
        if streams.team.is_main:
            request = Request(
                streams=streams,
                spectra=self._spectra,
                sites=prepared.sites,
                pairs=pairs,
                fixed=prepared.fixed_macs,
                speedup=options.speedup,
                scheme=options.forms,
                refits=options.asymmetric,
                sees=options.free_filters,
                arguments=options.to_json(),
                notes=self._session.notes,
                gradients=self._gradients,
                changes=lambda choices: self._changes(choices, pairs),
            )
            chosen = selector.choose(request)
        return self._as_plan(*streams.team.broadcast(chosen), options, selector)

    def _gradients(self) -> Mapping[str, Gradients]:
        """Measured once, on images of the main process. LeanconvError where the output has none."""
        if self._measured is None:
            try:
                self._measured = measure_gradients(self._streams, self._spectra)
            except LeanconvError as error:
                self._measured = error
        if isinstance(self._measured, LeanconvError):
            raise self._measured
        return self._measured

    def _metrics(self, options: Options) -> Mapping[str, Gradients]:
        """For the fit; none where there are no gradients, and none for the paper's."""
        if not (options.closed_form and options.forms.fitted and self._streams.team.is_main):
            return {}
        with suppress(LeanconvError):
            return self._gradients()
        return {}

    def _changes(self, choices: Choices, pairs: Pairs) -> list[Change]:
        """The changes of all layers, with those that only take in a factor."""
        takers = {taker for _, taker in active(choices, pairs)}
        sites = self._prepared.sites
        states = [self._state(name, choices, {}) for name in sites if name in choices or name in takers]
        return [state.change for state in states]

    def _state(self, name: str, choices: Choices, macs: Mapping[str, int]) -> LayerState:
        return LayerState(self._prepared.sites[name], self._spectra.dense[name], choices.get(name), macs.get(name, 0))

    def _applied_plan(self, plan: Plan, options: Options) -> Accelerated:
        prepared, streams, spectra, team = self._prepared, self._streams, self._spectra, self._streams.team
        if self._applied:
            streams.begin_again(self._session.memory())
        self._applied = True
        self._session.begin(options, plan.to_json())
        choices, pairs, macs = dict(plan), plan.pairs, plan.macs
        kept = team.broadcast(spectra.kept(prepared.pairs, prepared.survey) if team.is_main else None)
        takers = {taker for _, taker in pairs}
        layers = {
            name: self._state(name, choices, macs) for name in prepared.sites if name in choices or name in takers
        }
        gradients = self._metrics(options)  # while all responses are there
        if options.free_filters and team.is_main:
            spectra.see(streams, gradients)
        skipped = self._left_whole(layers, by_hand=isinstance(options.ranks, Mapping))
        energies = team.broadcast({name: spectra.candidates[name].energy(choice) for name, choice in choices.items()})
        for name, energy in energies.items():
            layers[name].energy = energy
        run = Run(
            streams=streams,
            targets=spectra.targets,
            dense=spectra.dense,
            gradients=gradients,
            options=options,
            session=self._session,
            keep_targets=not self._last,
        )
        with streams.clock.stage("solving"):
            splits = {}
            if team.is_main:
                free = options.free_filters
                splits = {name: spectra.split_of(name, choice, seen=free) for name, choice in choices.items()}
            split_filters(run, layers, {name: split for name, split in splits.items() if split is not None})
        if team.is_main and options.solver == "nonlinear" and options.forms.fitted:
            warn_of_linear_fits(layer.site for layer in layers.values() if layer.choice is not None)
        solve_layers(run, layers)
        if self._last:
            spectra.close()
        index = {name: prepared.sites[name].index for name in prepared.sites}
        for giver, taker in sorted(pairs, key=lambda pair: index[pair[0]]):
            one, other = layers[giver], layers[taker]
            one.change, other.change = join(streams.accelerated, one.change, other.change)
        given = {taker: choices[giver].ranks[-1:] for giver, taker in pairs}
        for name, buffer in streams.accelerated.named_buffers():
            if name in prepared.buffers and buffer.shape == prepared.buffers[name].shape:
                buffer.copy_(prepared.buffers[name])
        reports = [layers[name].report(given.get(name, ())) for name in sorted(layers, key=lambda name: index[name])]
        saved = sum(report.macs_before - report.macs_after for report in reports)
        # Layers that stay as they are share their weights with the original, which the next plan needs as it is.
        made = streams.accelerated if self._last else copied(streams.accelerated)
        return Accelerated(
            model=made.eval(),
            layers=reports,
            skipped=in_order(skipped, prepared.survey),
            macs_before=prepared.survey.macs,
            macs_after=prepared.survey.macs - saved,
            parameters_before=_parameters(prepared.original),
            parameters_after=_parameters(streams.accelerated),
            images=streams.images + sum(team.all_gather(self._given.checked)),
            changes=[layer.change for layer in layers.values()],
            options=options,
            source=identify(prepared.original),
            seconds=streams.clock.seconds,
            spectra=kept,
            timing=team.broadcast(plan.selector.final_times(streams) if plan.selector and team.is_main else None),
        )

    def _left_whole(self, layers: Mapping[str, LayerState], *, by_hand: bool) -> dict[str, str]:
        """Why each layer stays as it is. Responses of layers that could have been replaced are dropped."""
        prepared, skipped = self._prepared, dict(self._prepared.skipped)
        for name, site in prepared.sites.items():
            if name in layers:
                continue
            if self._last:
                self._spectra.targets.drop(name)
            skipped[name] = reasons.NOT_NAMED if by_hand else prepared.not_chosen(site)
        return skipped

    def _check_distillable(self) -> None:
        from leanconv.train.distill import check_distillable, check_examples

        check_distillable(self._model, self._session.team.world)
        check_examples(self._prepared.original, self._prepared.sites, self._streams.batches)

    def _distilled(self, result: Accelerated, options: Options) -> Accelerated:
        from leanconv.train.distill import distilled, joined

        session = self._session
        with session.clock.stage("distilling"):
            return distilled(
                result,
                self._model,
                joined(self._streams.batches, session.memory()),
                self._given.judges,
                steps=options.steps,
                seed=options.seed,
                device=session.device,
                workdir=None if session.work is None else session.work.distilling,
                progress=session.progress,
            )

    def _checked(self, result: Accelerated, original: nn.Module, accelerated: nn.Module) -> Accelerated:
        """``result`` with what both networks, on the device, do on the images held out."""
        from leanconv.pipeline.check import check

        with self._session.clock.stage("checking"):
            return replace(result, check=check(original, accelerated, self._given.held_out, self._streams))


def _asked(options: Options, **given: Any) -> Options:
    """``options`` with these arguments; None keeps the old value."""
    changed = options.changed(**{name: value for name, value in given.items() if value is not None})
    return options if changed == options and changed.custom is options.custom else changed


def analyze_model(
    model: nn.Module, images: Iterable[Any], options: Options, session: Session, *, last: bool
) -> Analysis:
    """``last``: only one plan will be applied, so responses are dropped as layers are solved."""
    try:
        with session.guarded():
            return _analyzed(model, images, options, session, last=last)
    except BaseException:
        session.close()
        raise


def _analyzed(model: nn.Module, images: Iterable[Any], options: Options, session: Session, *, last: bool) -> Analysis:
    with session.clock.stage("preparing"):
        given, prepared = looked_at(model, images, options, session)
        if isinstance(options.ranks, Mapping):  # refused before long work
            geometries = {name: site.geometry for name, site in prepared.sites.items()}
            by_hand(options.ranks, geometries, prepared.skipped, options.forms)
            prepared.keep_only(options.ranks)
        session.check_alike(model, given.fitted.images + given.put_aside, options)
    if session.keeps_state:
        with session.clock.stage("opening the workdir"):
            session.open_workdir(model, given.fitted, given.put_aside, options)
            if last:
                session.begin(options)
    streams = Streams(
        original=prepared.original,
        batches=given.fitted,
        seed=options.seed,
        samples=options.most_samples,
        memory=session.memory(),
        travel=session.travel,
        team=session.team,
        store=session.work,
        clock=session.clock,
        reporter=session.reporter,
    )
    dense = {name: prepared.probe(site) for name, site in prepared.sites.items()}
    streams.look(list(dense.values()))
    size_up(session, streams, prepared, options, last=last)
    targets = streams.targets(list(dense.values()))
    spectra = Spectra(dense, targets, options.forms)
    with session.clock.stage("statistics"), session.reporter.stage("statistics", len(dense)) as stage:
        if session.team.is_main:
            known = session.notes.read("spectra")
            if spectra.measure(known, stage.advance):
                session.notes.write("spectra", known)
    return Analysis(session, model, prepared, streams, spectra, options, given, last=last)


def reachable_speedup(model: nn.Module, images: Iterable[Any], options: Options, session: Session) -> float:
    with session.guarded():
        return looked_at(model, images, options, session)[1].reachable()


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
