"""What to try next, from the facts of a run: a few sentences, each with the command it means."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from leanconv.errors import listing
from leanconv.report.facts import Facts, LayerFacts
from leanconv.report.markup import points
from leanconv.report.repeat import plain_name

# A layer's error this many times the median of all stands out.
STANDS_OUT = 1.25
# A loss that may be this large, as a share, is not known to be small.
NARROW = 0.01
# Time that fell by less than this share of what MACs did needs a word.
BEHIND = 0.7


@dataclass(frozen=True)
class Advice:
    text: str
    command: str | None = None


def advice(facts: Facts) -> list[Advice]:
    """At most five, the most useful first."""
    found = [_judge(facts), _time(facts), _slow_layers(facts), _error(facts), _left_alone(facts)]
    return [one for one in found if one is not None]


def _judge(facts: Facts) -> Advice | None:
    folder, original = shlex.quote(facts.folder), shlex.quote(facts.original)
    tuned = shlex.quote(f"{plain_name(facts.folder)}-tuned")
    weights = "" if facts.weights is None else f" --weights {shlex.quote(facts.weights)}"
    if facts.accuracy is None or facts.accuracy.scores[0].lost is None:
        return Advice(
            "Nobody has looked at the answers yet: measure what was lost, side by side with the original.",
            f"leanconv evaluate {original} {folder} --data LABELLED{weights} --record",
        )
    first = facts.accuracy.scores[0]
    if first.interval is not None and first.within_noise:
        low, high = first.interval.low, first.interval.high
        if high >= NARROW:
            return Advice(
                f"What was lost in {first.label} lies somewhere between {points(low)} and {points(high)} points: too "
                "few images to tell, evaluate on more.",
                f"leanconv evaluate {original} {folder} --data MORE{weights} --record",
            )
        return Advice(
            f"What was lost in {first.label} is within noise: a larger speed-up may be had for little; the slider "
            "shows the ranks it would take."
        )
    if facts.tuned is None and (first.lost or 0) > 0:
        return Advice(
            f"{first.label} fell by {100 * (first.lost or 0):.2f} points: fine-tuning towards the original's answers "
            "wins part of it back and needs no labels.",
            f"leanconv finetune {folder} --data PHOTOS --distill {original}{weights} --out {tuned}",
        )
    return None


def _time(facts: Facts) -> Advice | None:
    command = f"leanconv bench {shlex.quote(facts.original)} {shlex.quote(facts.folder)} --layers --record"
    if facts.times is None:
        return Advice("MACs are not milliseconds: measure the time on the machine it is for.", command)
    one = facts.times.measurements[0]
    if facts.speedup > 1 and one.ratio.value < BEHIND * facts.speedup:
        said = (
            f"MACs fell {facts.speedup:.2f}x but time on {one.runtime}, batch {one.batch}, only {one.ratio.value:.2f}x"
        )
        if facts.options["scheme"] == "3d":
            return Advice(f"{said}: the channel scheme has one layer less in place of each and is often faster.")
        return Advice(f"{said}: small layers save less time than arithmetic; try another runtime or batch size.")
    if not facts.times.layers:
        return Advice("Time every layer too, to see where saved MACs became saved time.", command)
    return None


def _slow_layers(facts: Facts) -> Advice | None:
    slow = [layer.name for layer in facts.times.layers if layer.ratio.high < 1] if facts.times else []
    if not slow:
        return None
    names = " ".join(f"--skip {shlex.quote(name)}" for name in slow[:6])
    return Advice(
        f"{listing(slow, 4)} {'is' if len(slow) == 1 else 'are'} slower than before on this machine: leave "
        f"{'it' if len(slow) == 1 else 'them'} alone (and the first convolution, if it was).",
        f"leanconv accelerate ... {names}",
    )


def _error(facts: Facts) -> Advice | None:
    layers = [(layer.error, layer) for layer in facts.accelerated if layer.error is not None]
    if len(layers) < 3:
        return None
    errors = sorted(error for error, _ in layers)
    worst, layer = max(layers, key=lambda pair: pair[0])
    if worst < STANDS_OUT * errors[len(errors) // 2]:
        return None
    said = f"{layer.name} has the largest error ({worst:.3f}{', before fine-tuning' if facts.tuned else ''})"
    if facts.macs_after >= facts.macs_before:
        return Advice(f"{said}: leave it alone, as these ranks save nothing.")
    saved = (layer.macs_before - layer.macs_after) / (facts.macs_before - facts.macs_after)
    return Advice(
        f"{said} and brings {100 * saved:.0f} % of what is saved: a larger rank there, or leaving it alone, costs the "
        "least where that share is small."
    )


def _left_alone(facts: Facts) -> Advice | None:
    alone: list[LayerFacts] = [layer for layer in facts.layers if layer.scheme is None]
    share = sum(layer.macs_after for layer in alone) / facts.macs_after
    if share < 0.25:
        return None
    return Advice(
        f"Layers left alone make up {100 * share:.0f} % of what the network costs now; the reasons are below, and "
        "those that were kept by choice can be included."
    )
