"""Where the clock comes into a run of ``accelerate``: before the layers are solved, and once all is done."""

from __future__ import annotations

from collections.abc import Mapping

from leanconv.network.sites import Site
from leanconv.pipeline.engine import Engine
from leanconv.ranks import Candidate, Pairs, Plan
from leanconv.ranks.latency.plan import Changes, TimedPlan, Wish, measured, plan_by_time
from leanconv.ranks.latency.resume import remembered
from leanconv.runtimes.target import Measured, Target
from leanconv.system.random_state import untouched_rng


def timed_plan(
    engine: Engine,
    target: Target | None,
    sites: Mapping[str, Site],
    candidates: list[Candidate],
    pairs: Pairs,
    changes: Changes,
) -> tuple[Plan, Pairs]:
    """The plan for ``target`` and the pairs to merge; of a run that is gone on with, those it had."""
    assert target is not None
    options = engine.options

    def find() -> TimedPlan:
        with untouched_rng(options.seed):  # random factors are drawn until the clock is content
            return plan_by_time(
                engine.original,
                engine.batches.sample(),
                sites,
                candidates,
                pairs,
                target=target,
                wish=Wish(speedup=options.speedup, latency=options.latency),
                scheme=options.form,
                changes=changes,
                progress=engine.reporter,
            )

    found = remembered(None if engine.work is None else engine.work.folder, options.to_json(), find)
    return found.plan, found.pairs


def final_times(engine: Engine, target: Target | None) -> Measured | None:
    """Both networks as they are in the end; None where nothing is to be timed."""
    if target is None:
        return None
    found: Measured | None = None
    if engine.team.lead:
        with engine.clock.stage("timing"), engine.reporter.stage("timing both networks", 0):
            found = measured(engine.original, engine.accelerated.eval(), engine.batches.sample(), target)
    return engine.team.share(found)
