"""What keeps results from being compared, in sentences, each with the command that mends it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from leanconv.errors import listing
from leanconv.report.repeat import UNKNOWN

if TYPE_CHECKING:
    from leanconv.report.compare.results import Result, Setting

# Options of accelerate that say which weights the original has.
WEIGHTS = ("--weights", "--num-classes")
# What a command shows in place of one of several folders.
EACH = "FOLDER"


def remarks(results: Sequence[Result]) -> Iterator[str]:
    yield from _originals(results)
    yield from _unlike(results)
    tuned = [result.folder for result in results if result.tuned]
    if tuned:
        yield f"errors of the layers of {listing(tuned)} were measured before fine-tuning"
    lacking = [result for result in results if result.accuracy is None]
    yield from _missing("no accuracy is recorded; record it", lacking, results, evaluate_command)
    lacking = [result for result in results if not result.times]
    yield from _missing("no times are recorded; record them", lacking, results, bench_command)
    unknown = [
        result.folder for result in results if result.original == UNKNOWN and not (result.accuracy and result.times)
    ]
    if unknown:
        yield f"{UNKNOWN} stands for the original of {listing(unknown)}, as file.py:callable"


def _missing(
    said: str, lacking: Sequence[Result], results: Sequence[Result], command: Callable[[Result, Sequence[Result]], str]
) -> Iterator[str]:
    """One sentence for all folders that need the same command."""
    groups: dict[str, list[Result]] = {}
    for result in lacking:
        alike = [one for one in results if one.source == result.source]
        groups.setdefault(command(replace(result, folder=EACH), alike), []).append(result)
    for common, (first, *more) in groups.items():
        if more:
            yield f"{listing([one.folder for one in (first, *more)])}: {said}, for {EACH} each of them: {common}"
        else:
            alike = [one for one in results if one.source == first.source]
            yield f"{first.folder}: {said}: {command(first, alike)}"


def _originals(results: Sequence[Result]) -> Iterator[str]:
    sources = dict.fromkeys(result.source for result in results)
    if len(sources) > 1:
        yield (
            f"these were made from different networks ({listing(sources)}): what was lost and how much faster they are "
            "is each against its own original"
        )
    for source in sources:
        counts = {result.macs_before for result in results if result.source == source}
        if len(counts) > 1:
            macs = listing([f"{count / 1e6:.1f}" for count in sorted(counts)])
            yield (
                f"the originals called {source} differ ({macs} MMACs): other images, another part or other layers were "
                "counted, or they are other networks"
            )


def _unlike(results: Sequence[Result]) -> Iterator[str]:
    """Figures that were not measured on the same images or in the same way."""
    judged = [(result.accuracy, result.judged) for result in results if result.accuracy is not None]
    sets = dict.fromkeys(f"{shlex.join(options)}, {found.images} images" for found, options in judged)
    if len(sets) > 1:
        yield f"accuracy was measured on different images ({listing(sets, 3)}); evaluate all on the same ones"
    settings = [setting for result in results for setting, _ in result.times]
    for what, values in (
        ("machines", dict.fromkeys(setting.device for setting in settings)),
        ("types", dict.fromkeys(setting.dtype for setting in settings)),
        ("inputs", dict.fromkeys(setting.size for setting in settings)),
    ):
        if len(values) > 1:
            yield f"times were measured with different {what} ({listing(values, 3)}); bench all alike to compare them"


def evaluate_command(result: Result, alike: Sequence[Result]) -> str:
    """That records the accuracy of ``result``, on the data of those ``alike``."""
    options = next((one.judged for one in alike if one.judged), ("--data", "DATA"))
    return shlex.join(["leanconv", "evaluate", result.original, result.folder, *options, *_weights(result), "--record"])


def bench_command(result: Result, alike: Sequence[Result]) -> str:
    """That records the times of ``result``, in the settings of those ``alike``."""
    known = next((one.times for one in alike if one.times), ())
    words = ["leanconv", "bench", result.original, result.folder, *_settings([one for one, _ in known]), "--record"]
    return shlex.join(words)


def _settings(settings: Sequence[Setting]) -> list[str]:
    words: list[str] = []
    for runtime in dict.fromkeys(setting.runtime for setting in settings):
        words += ["--runtime", runtime]
    for batch in dict.fromkeys(setting.batch for setting in settings):
        words += ["--batch", str(batch)]
    if settings:
        words += ["--device", "cuda"] if settings[0].gpu else ["--device", "cpu", "--threads", str(settings[0].threads)]
        words += [] if settings[0].dtype == "float32" else ["--dtype", settings[0].dtype]
    return words


def _weights(result: Result) -> list[str]:
    """As they were given to the command that made it."""
    words = []
    for option in WEIGHTS:
        for number, word in enumerate(result.command[:-1]):
            if word == option:
                words += [option, result.command[number + 1]]
            elif word.startswith(f"{option}="):
                words += [word]
    return words
