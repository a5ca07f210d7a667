"""A plan that meets a time: forms are timed, ranks chosen, and the network they make is timed before it is solved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.errors import LeanconvError
from leanconv.forms import MERGED, Choices, Scheme
from leanconv.forms.merge import join
from leanconv.forms.replace import Change, replace
from leanconv.network.sites import Site
from leanconv.network.user_model import copied
from leanconv.progress import Progress
from leanconv.ranks import Candidate, Pairs, active
from leanconv.ranks.by_latency import Tables, Timed, select_timed
from leanconv.ranks.latency.grid import forms
from leanconv.ranks.latency.layer_times import Stopwatch, conditions_of, finishing, repeats, typical
from leanconv.runtimes.bench.machine import threads_set
from leanconv.runtimes.bench.measure import Rounds, interleaved, paired_ratio
from leanconv.runtimes.runners import RUNTIMES
from leanconv.runtimes.target import Measured, Target

# Seconds a pair of networks is timed for.
SECONDS = 6.0
# Plans that are tried as networks at most.
TRIALS = 4
# Times vary by a percent from run to run, and what is asked for is to be met: so much more is aimed at, and a plan that
# takes between 1 / NEAR and FITS of that will do.
AIM, NEAR, FITS = 1.02, 1.02, 1.005
# However much is asked for: forms for a network so many times faster are timed.
MOST = 16.0
# Plans that take so much longer than asked for are refused; what is nearer is what the clock says of it.
FAILED = 1.05
# Forms whose times were taken from their neighbours are timed themselves once they are chosen, and the choice is made
# again, so often at most.
REFINED = 3

Changes = Callable[[Choices], list[Change]]


@dataclass(frozen=True, kw_only=True)
class TimedPlan:
    """The ranks chosen and the pairs of layers to merge."""

    plan: Choices
    pairs: Pairs


@dataclass(frozen=True, kw_only=True)
class LatencyBudget:
    """What the whole network is to take: ``latency`` milliseconds, or, without, 1 / ``speedup`` of what it takes."""

    speedup: float
    latency: float | None

    def __str__(self) -> str:
        return f"speedup={self.speedup:g}" if self.latency is None else f"latency={self.latency:g}"

    def of(self, original: float) -> float:
        return original / self.speedup if self.latency is None else self.latency


def refuse(model: nn.Module, sample: Any, target: Target) -> None:
    """Say in one sentence why ``model`` cannot be timed on ``target``, before any time is spent."""
    if not isinstance(sample, Tensor):
        raise LeanconvError(
            "ranks='latency' times networks that take one tensor, which this one does not; use ranks='energy'."
        )
    RUNTIMES[target.runtime].refuse(model, conditions_of(target))


def plan_by_time(
    original: nn.Module,
    sample: Tensor,
    sites: Mapping[str, Site],
    candidates: list[Candidate],
    pairs: Pairs,
    *,
    target: Target,
    budget: LatencyBudget,
    scheme: Scheme,
    changes: Changes,
    progress: Progress,
) -> TimedPlan:
    """The plan that keeps most energy among those that meet ``budget``. ``changes``: what a plan does to the layers.

    The time of a plan is foretold as that of its layers one by one, plus what the original takes beyond its own layers
    one by one. A network with random factors then shows what it really takes, which corrects the second part.
    """
    watch = Stopwatch.of(target)
    networks = Networks(original, sample, target, pairs, changes)
    with progress.stage("timing the network", 0):
        rough = networks.original_ms()
    speedup = min(max(1.0, rough / budget.of(rough)), MOST)
    with progress.stage("timing layers", len(candidates)) as stage:
        asked = [(sites[one.name], forms(one.geometry, one.cost, scheme, speedup)) for one in candidates]
        watch.measure(asked, stage.advance)
        # Layers may have been timed yesterday, or before another program started: the network in their scale.
        before = watch.scale([sites[one.name] for one in candidates], networks.call())
    wanted = budget.of(before) / AIM
    counts = {one.name: repeats(sites[one.name]) for one in candidates}
    rest = before - sum(counts[one.name] * watch.times(sites[one.name]).known[None] for one in candidates)
    found: list[tuple[float, Choices]] = []
    with progress.stage("timing plans", TRIALS) as stage:
        for _ in range(TRIALS):
            plan, alone = _chosen(watch, sites, candidates, counts, wanted - rest)
            after = networks.accelerated_ms(plan, before)
            found.append((after, plan))
            stage.advance()
            if wanted / NEAR < after <= FITS * wanted or any(plan == other for _, other in found[:-1]):
                break
            rest = after - alone
    fitting = [pair for pair in found if pair[0] <= FITS * wanted]
    # The slowest that is fast enough keeps most.
    after, plan = max(fitting, key=lambda pair: pair[0]) if fitting else min(found, key=lambda pair: pair[0])
    if after > FAILED * wanted:
        raise LeanconvError(
            f"{budget} cannot be reached in {target.runtime}: of the {before:.3g} ms this network takes {after:.3g} ms "
            f"are left at best ({before / after:.2f}x); ask for that, or skip fewer layers."
        )
    return TimedPlan(plan=plan, pairs=active(plan, pairs))


def _chosen(
    watch: Stopwatch,
    sites: Mapping[str, Site],
    candidates: list[Candidate],
    counts: Mapping[str, float],
    budget: float,
) -> tuple[Choices, float]:
    """A plan and the time of its layers, every one of them timed itself."""
    for attempt in range(REFINED + 1):
        tables = _tables(watch, sites, candidates, counts)
        plan = select_timed(candidates, tables, budget)
        new = [(sites[name], [choice]) for name, choice in plan.items() if choice not in watch.times(sites[name]).known]
        if not new or attempt == REFINED:
            break
        watch.measure(new)
    chosen = {name: {timed.choice: timed.ms for timed in table} for name, table in tables.items()}
    return plan, sum(chosen[one.name][plan.get(one.name)] for one in candidates)


def _tables(
    watch: Stopwatch, sites: Mapping[str, Site], candidates: list[Candidate], counts: Mapping[str, float]
) -> Tables:
    return {
        one.name: [Timed(timed.choice, counts[one.name] * timed.ms) for timed in watch.times(sites[one.name]).table()]
        for one in candidates
    }


class Networks:
    """Whole networks timed on the target, against the original in turns."""

    def __init__(self, original: nn.Module, sample: Tensor, target: Target, pairs: Pairs, changes: Changes):
        self._original, self._target, self._pairs, self._changes = original, target, pairs, changes
        self._example = example(sample, target.batch)

    def call(self) -> Callable[[], Any]:
        """One run of the original."""
        conditions = conditions_of(self._target)
        with threads_set(conditions.threads):
            return RUNTIMES[self._target.runtime].prepare(self._original, self._example, conditions)

    def original_ms(self) -> float:
        return typical(self._rounds({"original": self._original}).times["original"])

    def accelerated_ms(self, plan: Choices, before: float) -> float:
        """Of a network with random factors of this plan, on a machine on which the original takes ``before``."""
        trial = copied(self._original, share=True)
        changes = {change.name: change for change in self._changes(plan)}
        for change in changes.values():
            if change.form is not MERGED:
                replace(trial, change)
        for giver, taker in active(plan, self._pairs):
            changes[giver], changes[taker] = join(trial, changes[giver], changes[taker])
        times = self._rounds({"original": self._original, "trial": trial}).times
        return typical(times["trial"]) * before / typical(times["original"])

    def _rounds(self, networks: Mapping[str, nn.Module]) -> Rounds:
        return _timed(networks, self._example, self._target)


def measured(original: nn.Module, accelerated: nn.Module, sample: Tensor, target: Target) -> Measured:
    """Both networks in turns, as they are."""
    times = _timed({"original": original, "accelerated": accelerated}, example(sample, target.batch), target).times
    ratio = paired_ratio(times["original"], times["accelerated"])
    before, after = (1e3 * float(torch.tensor(times[name]).median()) for name in ("original", "accelerated"))
    return Measured(
        target=target,
        original_ms=before,
        accelerated_ms=after,
        ratio=ratio.value,
        low=ratio.low,
        high=ratio.high,
    )


def _timed(networks: Mapping[str, nn.Module], images: Tensor, target: Target) -> Rounds:
    conditions = conditions_of(target)
    runner = RUNTIMES[target.runtime]
    with threads_set(conditions.threads):
        calls = {name: runner.prepare(network, images, conditions) for name, network in networks.items()}
        return interleaved(calls, seconds=SECONDS, finish=finishing(conditions.device))


def example(sample: Tensor, batch: int) -> Tensor:
    """A batch of the first image, float32 on the CPU."""
    return sample[:1].detach().cpu().float().expand(batch, *sample.shape[1:]).contiguous()
