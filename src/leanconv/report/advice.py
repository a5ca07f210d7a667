"""Sentences about one run (what to try next) and about several (why they cannot be compared), with commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from leanconv.errors import listing
from leanconv.evaluation.paired import points
from leanconv.report.facts import Facts
from leanconv.report.repeat import UNKNOWN, plain_name

# A layer's error this many times the median of all stands out.
STANDS_OUT = 1.25
# A loss that may be this large, as a share, is not known to be small.
NARROW = 0.01
# Time that fell by less than this share of what MACs did needs a word.
BEHIND = 0.7
# A share of the MACs in layers that were not replaced that needs a word.
MUCH_LEFT = 0.25
# What a command shows in place of one of several folders.
EACH = "FOLDER"


@dataclass(frozen=True)
class Advice:
    text: str
    command: str | None = None


def advice(facts: Facts) -> list[Advice]:
    """At most five, the most useful first."""
    items = [_accuracy(facts), _time(facts), _slow_layers(facts), _error(facts), _not_replaced(facts)]
    return [item for item in items if item is not None]


def _accuracy(facts: Facts) -> Advice | None:
    first = facts.accuracy.scores[0] if facts.accuracy else None
    if first is None or first.lost is None:
        return Advice(
            "Accuracy is not measured yet: measure what was lost, together with the original.",
            evaluate_command(facts, ("--data", "LABELLED")),
        )
    if first.interval is not None and first.within_noise:
        low, high = first.interval.low, first.interval.high
        if high >= NARROW:
            return Advice(
                f"What was lost in {first.label} lies somewhere between {points(low)} and {points(high)} points: too "
                "few images to tell, evaluate on more.",
                evaluate_command(facts, ("--data", "MORE")),
            )
        return Advice(
            f"What was lost in {first.label} is within noise: a larger speed-up may cost little; the slider shows the "
            "ranks it would take."
        )
    if facts.tuned is None and first.lost > 0:
        options = [facts.folder, "--data", "PHOTOS", "--distill", facts.original, *facts.original_options]
        return Advice(
            f"{first.label} fell by {100 * first.lost:.2f} points: fine-tuning towards the original's answers wins "
            "part of it back and needs no labels.",
            shlex.join(["leanconv", "finetune", *options, "--out", f"{plain_name(facts.folder)}-tuned"]),
        )
    return None


def _time(facts: Facts) -> Advice | None:
    command = shlex.join(["leanconv", "bench", facts.original, facts.folder, "--layers", "--record"])
    if facts.times is None:
        return Advice("MACs are not milliseconds: measure the time on the machine it is for.", command)
    first = facts.measurements[0]
    if facts.speedup > 1 and first.ratio.value < BEHIND * facts.speedup:
        said = f"MACs fell {facts.speedup:.2f}x but time on {first.runtime}, batch {first.batch}, only "
        said += f"{first.ratio.value:.2f}x"
        if any(len(layer.kinds) > 1 for layer in facts.layers):
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
    be, them = ("is", "it") if len(slow) == 1 else ("are", "them")
    return Advice(
        f"{listing(slow, 4)} {be} slower than before on this machine: skip {them} (and the first convolution, if it "
        "was skipped).",
        f"leanconv accelerate ... {names}",
    )


def _error(facts: Facts) -> Advice | None:
    errors = facts.errors
    if len(errors) < 3:
        return None
    worst = max(errors, key=errors.__getitem__)
    if errors[worst] < STANDS_OUT * sorted(errors.values())[len(errors) // 2]:
        return None
    said = f"{worst} has the largest error ({errors[worst]:.3f}{', before fine-tuning' if facts.tuned else ''})"
    if facts.macs_after >= facts.macs_before:
        return Advice(f"{said}: skip it, as these ranks save nothing.")
    layer = next(layer for layer in facts.layers if layer.name == worst)
    saved = (layer.macs_before - layer.macs_after) / (facts.macs_before - facts.macs_after)
    return Advice(
        f"{said} and brings {100 * saved:.0f} % of what is saved: where that share is small, a larger rank there, or "
        "skipping it, costs little."
    )


def _not_replaced(facts: Facts) -> Advice | None:
    share = sum(layer.macs_after for layer in facts.layers if layer.scheme is None) / facts.macs_after
    if share < MUCH_LEFT:
        return None
    return Advice(
        f"Layers that were not replaced make up {100 * share:.0f} % of what the network costs now; the reasons are "
        "below, and those that were skipped by choice can be included."
    )


def remarks(results: Sequence[Facts]) -> Iterator[str]:
    """Why ``results`` cannot be compared, and what to do about it."""
    yield from _originals(results)
    yield from _measured_differently(results)
    tuned = [one.folder for one in results if one.tuned]
    if tuned:
        yield f"errors of the layers of {listing(tuned)} were measured before fine-tuning"
    lacking = [one for one in results if one.accuracy is None]
    yield from _missing("no accuracy is recorded; record it", lacking, results, evaluate_like)
    lacking = [one for one in results if one.times is None]
    yield from _missing("no times are recorded; record them", lacking, results, bench_like)
    unknown = [one.folder for one in results if one.original == UNKNOWN and not (one.accuracy and one.times)]
    if unknown:
        yield f"{UNKNOWN} stands for the original of {listing(unknown)}, as file.py:callable"


def _missing(
    said: str, lacking: Sequence[Facts], results: Sequence[Facts], command: Callable[[Facts, Sequence[Facts]], str]
) -> Iterator[str]:
    """One sentence for all folders that need the same command."""
    groups: dict[str, list[Facts]] = {}
    for one in lacking:
        groups.setdefault(command(replace(one, folder=EACH), results), []).append(one)
    for common, (first, *more) in groups.items():
        if more:
            yield f"{listing([one.folder for one in (first, *more)])}: {said}, for {EACH} each of them: {common}"
        else:
            yield f"{first.folder}: {said}: {command(first, results)}"


def _originals(results: Sequence[Facts]) -> Iterator[str]:
    sources = dict.fromkeys(one.source for one in results)
    if len(sources) > 1:
        yield (
            f"these were made from different networks ({listing(sources)}): what was lost and how much faster they are "
            "is each against its own original"
        )
    for source in sources:
        counts = {one.macs_before for one in results if one.source == source}
        if len(counts) > 1:
            macs = listing([f"{count / 1e6:.1f}" for count in sorted(counts)])
            yield (
                f"the originals called {source} differ ({macs} MMACs): other images, another part or other layers were "
                "counted, or they are other networks"
            )


def _measured_differently(results: Sequence[Facts]) -> Iterator[str]:
    measured = [one.accuracy for one in results if one.accuracy]
    sets = dict.fromkeys(f"{shlex.join(one.options)}, {one.images} images" for one in measured)
    if len(sets) > 1:
        yield f"accuracy was measured on different images ({listing(sets, 3)}); evaluate all on the same ones"
    timed = [timed for one in results for timed in one.measurements]
    for what, values in (
        ("machines", dict.fromkeys(one.device for one in timed)),
        ("types", dict.fromkeys(one.dtype for one in timed)),
        ("inputs", dict.fromkeys(one.size for one in timed)),
    ):
        if len(values) > 1:
            yield f"times were measured with different {what} ({listing(values, 3)}); bench all alike to compare them"


def evaluate_command(one: Facts, data: Sequence[str]) -> str:
    """The command that records the accuracy of ``one``; ``data``: the options that name the images."""
    return shlex.join(["leanconv", "evaluate", one.original, one.folder, *data, *one.original_options, "--record"])


def evaluate_like(one: Facts, results: Sequence[Facts]) -> str:
    """The same on the images of those of ``results`` that have the same original."""
    known = (other.accuracy.options for other in results if other.source == one.source and other.accuracy)
    return evaluate_command(one, next(known, ("--data", "DATA")))


def bench_like(one: Facts, results: Sequence[Facts]) -> str:
    """The command that records the times of ``one``, with the settings of those of ``results`` that have the same
    original."""
    words = ["leanconv", "bench", one.original, one.folder]
    known = (other.measurements for other in results if other.source == one.source and other.times)
    measurements = next(known, [])
    for runtime in dict.fromkeys(timed.runtime for timed in measurements):
        words += ["--runtime", runtime]
    for batch in dict.fromkeys(timed.batch for timed in measurements):
        words += ["--batch", str(batch)]
    for first in measurements[:1]:
        words += ["--device", "cuda"] if first.gpu else ["--device", "cpu", "--threads", str(first.threads)]
        words += [] if first.dtype == "float32" else ["--dtype", first.dtype]
    return shlex.join([*words, "--record"])
