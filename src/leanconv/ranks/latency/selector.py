"""Ranks by measured time: forms are timed, ranks chosen, and the network they make is timed before it is solved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import replace as with_changes
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.calibrate.streams import Streams
from leanconv.errors import LeanconvError
from leanconv.forms import FORMS, MERGED, Choice, Choices
from leanconv.forms.replace import join, replace
from leanconv.network.user_model import copied, device_of, parse_device
from leanconv.ranks.latency.choose import forms, interpolated, select_timed
from leanconv.ranks.latency.layer_times import Stopwatch, conditions_of, repeats, typical
from leanconv.ranks.merging import Pairs, active
from leanconv.ranks.selector import Energy, RankSelector, Request
from leanconv.runtimes.bench.machine import threads_set
from leanconv.runtimes.bench.measure import Rounds, interleaved, paired_ratio, wait_for
from leanconv.runtimes.runners import RUNTIMES
from leanconv.runtimes.target import Measured, Target
from leanconv.system.fields import number_in
from leanconv.system.random_state import untouched_rng

# Seconds that two networks are timed for.
SECONDS = 6.0
# Plans that are tried as networks at most.
TRIALS = 4
# Times vary by a percent from run to run, and the target must be met: the search aims at 1 / AIM of it, and accepts a
# plan that takes between 1 / NEAR and FITS of that.
AIM, NEAR, FITS = 1.02, 1.02, 1.005
# Forms are timed for networks at most this many times faster, whatever the target.
MOST = 16.0
# A plan that takes this many times the target is refused; below that, measured times are not exact enough to tell.
FAILED = 1.05
# Times of some forms are interpolated. When such a form is chosen it is timed, and the choice made again, at most this
# often.
REFINED = 3


@dataclass(frozen=True, kw_only=True)
class LatencyBudget:
    """Time for the whole network: ``latency`` milliseconds, or, without, 1 / ``speedup`` of what it takes now."""

    speedup: float
    latency: float | None

    def __str__(self) -> str:
        return f"speedup={self.speedup:g}" if self.latency is None else f"latency={self.latency:g}"

    def of(self, original: float) -> float:
        return original / self.speedup if self.latency is None else self.latency


@dataclass(frozen=True)
class Latency(Energy):
    """Times the forms of every layer on ``target`` and keeps the most energy in ``ms`` milliseconds for the whole
    network, or, without, in 1 / ``speedup`` of the time it takes now."""

    ms: float | None = None
    target: Target | None = None

    name = "latency"

    def __post_init__(self) -> None:
        if self.ms is not None:
            try:
                number_in("latency", self.ms, above=0, under=1e9)
            except LeanconvError:
                raise LeanconvError(f"latency={self.ms!r} must be milliseconds above 0, for example 50.") from None
        object.__setattr__(self, "target", Target.check(self.target))

    def prepared(self, model: nn.Module, sample: Any, *, comparable: bool) -> RankSelector:
        target = Target.check(self.target)
        target = with_changes(target, device=str(parse_device(target.device or device_of(model))))
        if not isinstance(sample, Tensor):
            raise LeanconvError(
                "ranks='latency' times networks that take one tensor, which this one does not; use ranks='energy'."
            )
        RUNTIMES[target.runtime].refuse(model, conditions_of(target))
        return with_changes(self, target=target)

    def choose(self, request: Request) -> tuple[Choices, Pairs]:
        """A run that continues takes its earlier plan: measured again, it would be another one."""
        assert self.target is not None
        known = _known(request.notes.read("plan"), request.arguments)
        if known is None:
            budget = LatencyBudget(speedup=request.speedup, latency=self.ms)
            # How many random factors are drawn depends on the measured times.
            with request.streams.clock.stage("choosing ranks"), untouched_rng(request.streams.seed):
                known = plan_by_time(request, self.target, budget)
            choices, pairs = known
            plan = {name: [choice.form.name, choice.ranks] for name, choice in choices.items()}
            request.notes.write("plan", {"options": request.arguments, "plan": plan, "pairs": pairs})
        return known

    def final_times(self, streams: Streams) -> Measured | None:
        """The original and the accelerated network, timed in turns."""
        assert self.target is not None
        with streams.clock.stage("timing"), streams.reporter.stage("timing both networks", 0):
            networks = {"original": streams.original, "accelerated": streams.accelerated.eval()}
            times = _timed(networks, example(streams.batches.sample(), self.target.batch), self.target).times
        ratio = paired_ratio(times["original"], times["accelerated"])
        before, after = (1e3 * float(torch.tensor(times[name]).median()) for name in networks)
        return Measured(
            target=self.target,
            original_ms=before,
            accelerated_ms=after,
            ratio=ratio.value,
            low=ratio.low,
            high=ratio.high,
        )


def _known(data: dict[str, Any], arguments: dict[str, Any]) -> tuple[Choices, Pairs] | None:
    """The plan that an earlier process with the same ``arguments`` wrote down."""
    try:
        if data["options"] != arguments:
            return None
        plan = {name: Choice(FORMS[form], tuple(ranks)) for name, (form, ranks) in data["plan"].items()}
        return plan, [(giver, taker) for giver, taker in data["pairs"]]
    except (ValueError, KeyError, TypeError):
        return None


def plan_by_time(request: Request, target: Target, budget: LatencyBudget) -> tuple[Choices, Pairs]:
    """The plan with the most energy among those that meet ``budget``, and the pairs of layers to merge.

    The predicted time of a plan is that of its layers one by one, plus the time of the original that its own layers,
    one by one, do not explain. Timing a network with random factors then corrects this second part.
    """
    sites, progress = request.sites, request.streams.reporter
    watch, networks = Stopwatch.of(target), Networks(request, target)
    with progress.stage("timing the network", 0):
        rough = networks.original_ms()
    speedup = min(max(1.0, rough / budget.of(rough)), MOST)
    with progress.stage("timing layers", len(sites)) as stage:
        asked = [(site, forms(site.geometry, site.cost, request.scheme, speedup)) for site in sites.values()]
        watch.measure(asked, stage.advance)
        # Layers may have been timed on another day, or before another program started: use their scale.
        before = watch.scale(sites.values(), networks.call())
    aim = budget.of(before) / AIM
    rest = before - sum(repeats(site) * watch.times(site)[None] for site in sites.values())
    tried: list[tuple[float, Choices]] = []
    with progress.stage("timing plans", TRIALS) as stage:
        for _ in range(TRIALS):
            plan, alone = _plan_of_timed_forms(watch, request, aim - rest)
            after = networks.accelerated_ms(plan, before)
            repeated = any(plan == other for _, other in tried)
            tried.append((after, plan))
            stage.advance()
            if aim / NEAR < after <= FITS * aim or repeated:
                break
            rest = after - alone
    fitting = [pair for pair in tried if pair[0] <= FITS * aim]
    # The slowest plan that is fast enough keeps the most energy.
    after, plan = max(fitting, key=lambda pair: pair[0]) if fitting else min(tried, key=lambda pair: pair[0])
    if after > FAILED * aim:
        raise LeanconvError(
            f"{budget} cannot be reached in {target.runtime}: of the {before:.3g} ms this network takes {after:.3g} ms "
            f"are left at best ({before / after:.2f}x); ask for that, or skip fewer layers."
        )
    return plan, active(plan, request.pairs)


def _plan_of_timed_forms(watch: Stopwatch, request: Request, budget: float) -> tuple[Choices, float]:
    """A plan and the time of its layers, each of them timed and not interpolated."""
    sites = request.sites
    for attempt in range(REFINED + 1):
        tables = {
            name: {choice: repeats(site) * ms for choice, ms in interpolated(watch.times(site)).items()}
            for name, site in sites.items()
        }
        plan = select_timed(request.candidates, tables, budget)
        new = [(sites[name], [choice]) for name, choice in plan.items() if choice not in watch.times(sites[name])]
        if not new or attempt == REFINED:
            break
        watch.measure(new)
    return plan, sum(tables[name][plan.get(name)] for name in sites)


class Networks:
    """Whole networks timed on the target, in turns with the original."""

    def __init__(self, request: Request, target: Target):
        self._request, self._target, self._original = request, target, request.streams.original
        self._example = example(request.streams.batches.sample(), target.batch)

    def call(self) -> Callable[[], Any]:
        """One run of the original."""
        conditions = conditions_of(self._target)
        with threads_set(conditions.threads):
            return RUNTIMES[self._target.runtime].prepare(self._original, self._example, conditions)

    def original_ms(self) -> float:
        return typical(self._rounds({"original": self._original}).times["original"])

    def accelerated_ms(self, plan: Choices, before: float) -> float:
        """A network with random factors of this plan, on a machine on which the original takes ``before``."""
        trial = copied(self._original, share=True)
        changes = {change.name: change for change in self._request.changes(plan)}
        for change in changes.values():
            if change.form is not MERGED:
                replace(trial, change)
        for giver, taker in active(plan, self._request.pairs):
            changes[giver], changes[taker] = join(trial, changes[giver], changes[taker])
        times = self._rounds({"original": self._original, "trial": trial}).times
        return typical(times["trial"]) * before / typical(times["original"])

    def _rounds(self, networks: Mapping[str, nn.Module]) -> Rounds:
        return _timed(networks, self._example, self._target)


def _timed(networks: Mapping[str, nn.Module], images: Tensor, target: Target) -> Rounds:
    conditions = conditions_of(target)
    runner = RUNTIMES[target.runtime]
    with threads_set(conditions.threads):
        calls = {name: runner.prepare(network, images, conditions) for name, network in networks.items()}
        return interleaved(calls, seconds=SECONDS, finish=wait_for(conditions.device))


def example(sample: Tensor, batch: int) -> Tensor:
    """A batch of the first image, float32 on the CPU."""
    return sample[:1].detach().cpu().float().expand(batch, *sample.shape[1:]).contiguous()
