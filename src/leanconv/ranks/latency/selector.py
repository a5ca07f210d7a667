"""Ranks by the clock, and the times of both networks at the end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from leanconv.calibrate.streams import Streams
from leanconv.errors import LeanconvError
from leanconv.forms import FORMS, Choice, Choices
from leanconv.network.user_model import device_of, parse_device
from leanconv.ranks.latency.plan import LatencyBudget, TimedPlan, measured, plan_by_time, refuse
from leanconv.ranks.merging import Pairs
from leanconv.ranks.selector import Energy, RankSelector, Request
from leanconv.runtimes.target import Measured, Target
from leanconv.system.fields import number_in
from leanconv.system.random_state import untouched_rng


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
        target = replace(target, device=str(parse_device(target.device or device_of(model))))
        refuse(model, sample, target)
        return replace(self, target=target)

    def final_times(self, streams: Streams) -> Measured | None:
        assert self.target is not None
        with streams.clock.stage("timing"), streams.reporter.stage("timing both networks", 0):
            return measured(streams.original, streams.accelerated.eval(), streams.batches.sample(), self.target)

    def choose(self, request: Request) -> tuple[Choices, Pairs]:
        """Of a run that is gone on with, the plan it had: measured again, it would be another one."""
        assert self.target is not None
        known = _known(request.notes.read("plan"), request.arguments)
        if known is None:
            clock = request.streams.clock
            with (
                clock.stage("choosing ranks"),
                untouched_rng(request.streams.seed),
            ):  # random factors are drawn until the clock is content
                known = plan_by_time(
                    request.streams.original,
                    request.streams.batches.sample(),
                    request.sites,
                    request.candidates,
                    request.pairs,
                    target=self.target,
                    budget=LatencyBudget(speedup=request.speedup, latency=self.ms),
                    scheme=request.scheme,
                    changes=request.changes,
                    progress=request.streams.reporter,
                )
            plan = {name: [choice.form.name, choice.ranks] for name, choice in known.plan.items()}
            request.notes.write("plan", {"options": request.arguments, "plan": plan, "pairs": known.pairs})
        return known.plan, known.pairs


def _known(data: dict[str, Any], arguments: dict[str, Any]) -> TimedPlan | None:
    try:
        if data["options"] != arguments:
            return None
        return TimedPlan(
            plan={name: Choice(FORMS[form], tuple(ranks)) for name, (form, ranks) in data["plan"].items()},
            pairs=[(giver, taker) for giver, taker in data["pairs"]],
        )
    except (ValueError, KeyError, TypeError):
        return None
