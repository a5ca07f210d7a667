"""From a plan to weights: every layer fitted in its turn and put into the accelerated network.

Read ``solve_layers`` first: it is the loop. Layers are fitted shallow to deep, each to the original's responses, from
what it responds in the network whose layers before it are replaced already.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from leanconv.calibrate.gradients import Gradients
from leanconv.calibrate.probes import PatchProbe, Probe, Responses
from leanconv.calibrate.samples import Samples
from leanconv.calibrate.streams import Streams, collected, drawn
from leanconv.config import Options
from leanconv.errors import LeanconvError
from leanconv.forms import MERGED, Choice
from leanconv.forms.fit import Fit, Outcome, fit_layer, measure, samples_needed, split_factors, split_probe
from leanconv.forms.replace import Change, change_of
from leanconv.forms.replace import replace as replace_layer
from leanconv.network.layers.modules import Factors
from leanconv.network.sites import Site
from leanconv.pipeline.session import Session
from leanconv.progress import Solved
from leanconv.result import LayerReport
from leanconv.solve import Moments, Parts, TwoStep, parted, thinned
from leanconv.system.process_memory import give_back

# Patches a layer, of so many images, that splits are improved by: 4 bytes x ROWS x c k k, 151 MB for c = 512, k = 3.
IMAGES, ROWS = 512, 8192


@dataclass
class LayerState:
    """A layer that is replaced, or, without a ``choice``, one that only takes in a factor of the layer before it.

    ``dense``: a probe of its own filters. ``probe``: of those it is fitted with, which may be a product of two.
    """

    site: Site
    dense: Probe
    choice: Choice | None
    macs: int
    energy: float = 1.0
    probe: Probe = None  # type: ignore[assignment]  # dense, unless the filters are split
    change: Change = None  # type: ignore[assignment]
    outcome: Outcome | None = None

    def __post_init__(self) -> None:
        self.probe = self.dense
        # A layer that stays whole keeps its batch norm where it is.
        whole = Change(name=self.name, form=MERGED, ranks=(), geometry=self.site.geometry)
        self.change = whole if self.choice is None else change_of(self.site, self.choice)

    @property
    def name(self) -> str:
        return self.site.name

    def split_into(self, split: TwoStep, *, free: bool) -> None:
        self.probe = split_probe(self.dense, split, free=free)

    def report(self, taken: tuple[int, ...]) -> LayerReport:
        """For the result. ``taken``: the d' that a layer which stays whole has taken in."""
        assert self.outcome is not None
        return LayerReport(
            name=self.name,
            scheme=self.change.form.name,
            ranks=taken if self.choice is None else self.choice.ranks,
            macs_before=self.site.cost.dense,
            macs_after=self.macs,
            energy=self.energy,
            **asdict(self.outcome),
        )

    def described(self, error: float | None) -> Solved:
        """One line of progress."""
        if self.choice is None:
            return Solved(self.name, "whole", (), error)
        return Solved(self.name, self.choice.form.name, self.choice.ranks, error)


Layers = dict[str, LayerState]


@dataclass
class Run:
    """What all layers are solved with."""

    streams: Streams
    targets: Samples  # the original's responses
    dense: dict[str, Probe]  # of all sites, those that stay as they are too
    gradients: Mapping[str, Gradients]  # of the output at the layers; none for a fit that does not ask what matters
    options: Options
    session: Session
    keep_targets: bool  # for another plan

    def solved_before(self) -> dict[str, Fit]:
        """The layers an earlier process has solved."""
        return self.streams.team.broadcast(
            {} if self.session.work is None else self.session.work.solved(self.streams.device)
        )

    def keep(self, number: int, name: str, fit: Fit | None) -> Fit:
        """The main process's ``fit``, everywhere, and in the workdir."""
        if self.session.work is not None and fit is not None:
            self.session.work.keep_solved(number, name, fit)
        return self.streams.team.broadcast(fit)

    def put(self, layer: LayerState, factors: Factors) -> None:
        if layer.choice is not None:
            replace_layer(self.streams.accelerated, layer.change, factors)

    def done_with(self, name: str) -> None:
        if not self.keep_targets:
            self.targets.drop(name)


def solve_layers(run: Run, layers: Layers) -> None:
    """Give every layer its factors, in the accelerated network, and its outcome."""
    if not run.options.forms.fitted:
        _put_splits(run, layers)
    elif not run.options.asymmetric:
        _solve_symmetric(run, layers)
    else:
        _solve_asymmetric(run, layers)


def _solve_asymmetric(run: Run, layers: Layers) -> None:
    streams, clock, known = run.streams, run.streams.clock, run.solved_before()
    for name, fit in known.items():
        run.put(layers[name], fit.factors)
        layers[name].outcome = fit.outcome
    if all(name in known for name in layers):
        return
    probes = {name: layer.probe for name, layer in layers.items()}
    steps = (len(layers) - len(known)) * (streams.batches.steps + 1)
    with streams.reporter.stage("solving", steps) as stage:
        if known:
            stage.label(f"{len(known)} of {len(layers)} layers are known from the workdir")
        for number, name, inputs in streams.respond(probes, list(run.dense.values()), known, stage.advance):
            layer = layers[name]
            new: Fit | None = None
            if inputs is not None:
                with clock.stage("solving"):
                    new = _fit(run, layer, run.targets.get(name), inputs)
                    run.done_with(name)
                    inputs = None
            fit = run.keep(number, name, new)
            with clock.stage("solving"):
                run.put(layer, fit.factors)
                gc.collect(1)  # young objects only: see quiet_collector
                if streams.device.type == "cpu":
                    give_back()
            layer.outcome = fit.outcome
            run.session.threads.follow()
            stage.advance()
            stage.solved(layer.described(fit.outcome.error), number, len(layers))


def _solve_symmetric(run: Run, layers: Layers) -> None:
    """Every layer fitted to the original's inputs."""
    streams, known = run.streams, run.solved_before()
    chosen = {name: layer for name, layer in layers.items() if layer.choice is not None}
    todo = [layer.probe for name, layer in chosen.items() if name not in known]
    inputs = run.targets
    if any(layer.probe.split is not None for layer in chosen.values()) and todo:
        inputs = streams.responses(streams.original, todo, "split filters")
    with streams.reporter.stage("solving", len(chosen)) as stage:
        for number, (name, layer) in enumerate(chosen.items(), 1):
            if name not in known:
                fit: Fit | None = None
                if streams.team.is_main:
                    with streams.clock.stage("solving"):
                        target = run.targets.get(name)
                        fit = _fit(run, layer, target, target if inputs is run.targets else inputs.get(name))
                        run.done_with(name)
                        if inputs is not run.targets:
                            inputs.drop(name)
                known[name] = run.keep(number, name, fit)
            run.put(layer, known[name].factors)
            layer.outcome = known[name].outcome
            run.session.threads.follow()
            stage.advance()
            stage.solved(layer.described(known[name].outcome.error), number, len(chosen))
    _measure(run, {name: layer for name, layer in layers.items() if layer.choice is None})


def _put_splits(run: Run, layers: Layers) -> None:
    """Forms of filters alone: nothing is fitted. Errors are measured in the network as it ends up."""
    with run.streams.reporter.stage("solving", len(layers)) as stage:
        for layer in layers.values():
            stage.advance()
            run.put(layer, split_factors(layer.probe))
    _measure(run, layers)


def _measure(run: Run, layers: Layers) -> None:
    """Errors of ``layers`` in the accelerated network as it stands."""
    if not layers:
        return
    streams, errors = run.streams, {}
    seen = streams.responses(streams.accelerated, [layer.probe for layer in layers.values()], "measuring")
    if streams.team.is_main:
        with streams.reporter.stage("errors", len(layers)) as stage:
            for number, (name, layer) in enumerate(layers.items(), 1):
                errors[name] = measure(layer.site, run.targets.get(name), seen.get(name))
                stage.advance()
                stage.solved(layer.described(errors[name]), number, len(layers))
    for name, error in streams.team.broadcast(errors).items():
        layers[name].outcome = Outcome(error)


def _fit(run: Run, layer: LayerState, target: Responses, inputs: Responses) -> Fit:
    """``target``: the original's responses. ``inputs``: what the layer's probe gives, to fit them from."""
    if len(inputs.y) != len(target.y):
        raise LeanconvError(
            f"layer {layer.name!r} ran on other positions once the layers before it were accelerated: what this "
            "network runs depends on the data; name that layer in skip."
        )
    if layer.choice is None:  # it only takes in the factor of another
        return Fit(Factors((), target.y.new_empty(0)), Outcome(measure(layer.site, target, inputs)))
    options, probe, choice, enough = run.options, layer.probe, layer.choice, None
    rows = len(target.y)
    alike = rows == run.streams.images * run.streams.positions.count(layer.site.positions)
    holdout = _holdout(run, layer, rows, alike=alike)
    if options.samples == "auto" and holdout is not None:
        needed = samples_needed(probe, choice, target=target, inputs=inputs, solver=options.solver, holdout=holdout)
        enough = None if needed is None else needed.enough
        if needed is not None and needed.rows < rows:
            kept = thinned(rows, needed.rows).to(target.y.device)
            fewer = target.at(kept)
            target, inputs = fewer, fewer if inputs is target else inputs.at(kept)
            holdout = holdout.at(kept, rows)
    # Which rows an image has must be known for sure: else they depend on how the images were cut into batches.
    used = holdout if options.closed_form and alike else None
    felt = run.gradients.get(layer.name)
    metric = [] if felt is None or used is None else felt.metrics
    fit = fit_layer(probe, choice, target=target, inputs=inputs, solver=options.solver, holdout=used, metric=metric)
    # Who has chosen the number has looked at several: that counts for more than an extrapolation from one.
    return fit if enough is None else Fit(fit.factors, replace(fit.outcome, enough=enough, needed=None))


def _holdout(run: Run, layer: LayerState, rows: int, *, alike: bool) -> Parts | None:
    """Which samples are held out. None for a layer that runs on several maps: its rows are in their order, not in that
    of the images. ``alike``: whether every image has equally many rows."""
    return None if layer.site.calls > 1 else parted(rows, run.streams.images, alike=alike)


def split_filters(run: Run, layers: Layers, splits: dict[str, TwoStep]) -> None:
    """Split the filters of the layers whose form wants that: ``splits`` of the main process, as another machine may
    round its eigenvectors elsewhere. Forms may improve theirs by what their layers see."""
    shared: dict[str, TwoStep] | None = None
    if run.streams.team.is_main:
        shared = {**splits, **_improved(run, layers, splits)}
    for name, split in run.streams.team.broadcast(shared).items():
        layers[name].split_into(split, free=run.options.free_filters)


def _improved(run: Run, layers: Layers, splits: dict[str, TwoStep]) -> dict[str, TwoStep]:
    """Those of layers that an earlier process has solved are left out. One pass of IMAGES images.

    Images that are held out later, to judge a layer's fit by, are among them: white patches are beside these, and who
    judges does so with the second half fitted anew.
    """
    known = {} if run.session.work is None else run.session.work.solved(run.streams.device)
    forms = {name: layers[name].choice.form for name in splits}  # type: ignore[union-attr]
    probes: dict[str, Probe] = {
        name: PatchProbe(layers[name].site, layers[name].dense.weight, layers[name].dense.bias)
        for name in splits
        if forms[name].needs_patches and name not in known
    }
    if not probes:
        return {}
    images, found = drawn(run.streams, IMAGES), {}
    with run.streams.reporter.stage("fitting splits", len(images) + len(probes)) as stage:
        seen = collected(run.streams, images, probes, ROWS, stage.advance)
        for name, probe in probes.items():
            patches = Moments.of(seen.get(name).y)
            seen.drop(name)
            found[name] = forms[name].improved(splits[name], probe.weight, patches)
            stage.advance()
    seen.close()
    return found
