"""What the two charts show, as plain data: accuracy against MACs, and against milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from leanconv.report.compare.results import Result
from leanconv.report.measured import Score


@dataclass(frozen=True)
class Point:
    """``y`` in percent, ``low`` to ``high`` its interval, the original's share taken as known."""

    name: str
    x: float
    y: float
    low: float
    high: float


@dataclass
class Series:
    """Points of one kind, cheapest first; an ``original`` is one point."""

    name: str
    original: bool
    points: list[Point] = field(default_factory=list)


def against_macs(results: Sequence[Result]) -> list[dict[str, object]]:
    """x in millions of multiply-accumulates."""
    name = _namer(results)
    return _grouped(
        (
            result,
            score,
            name(result, result.form),
            result.source,
            result.macs_before / 1e6,
            result.macs_after / 1e6,
        )
        for result, score in _scored(results)
    )


def against_time(results: Sequence[Result]) -> list[dict[str, object]]:
    """x in milliseconds of a batch; a series a setting."""
    name = _namer(results)
    return _grouped(
        (
            result,
            score,
            name(result, f"{result.form}, {setting}"),
            name(result, str(setting)),
            timed.before.value,
            timed.after.value,
        )
        for result, score in _scored(results)
        for setting, timed in result.times
    )


def measures(results: Sequence[Result]) -> list[str]:
    """What accuracy is here: usually one measure."""
    return list(dict.fromkeys(score.label for _, score in _scored(results)))


def _namer(results: Sequence[Result]) -> Callable[[Result, str], str]:
    """Names of series, which say what they were made from where that differs."""
    several = len({result.source for result in results}) > 1
    return lambda result, what: f"{result.source}, {what}" if several else what


def _scored(results: Sequence[Result]) -> Iterator[tuple[Result, Score]]:
    """With the measure that counts most."""
    for result in results:
        if result.accuracy is not None:
            yield result, result.accuracy.scores[0]


def _grouped(found: Iterator[tuple[Result, Score, str, str, float, float]]) -> list[dict[str, object]]:
    series: dict[tuple[str, bool], Series] = {}
    for result, score, name, original, before, after in found:
        value = 100 * score.value
        low = high = value
        if score.interval is not None and score.original is not None:
            low, high = (100 * (score.original - lost) for lost in (score.interval.high, score.interval.low))
        series.setdefault((name, False), Series(name, False)).points.append(
            Point(result.folder, after, value, low, high)
        )
        if score.original is not None:
            whole = 100 * score.original
            # Timed anew beside every folder: the first stands for all.
            series.setdefault((original, True), Series(original, True, [Point(original, before, whole, whole, whole)]))
    for one in series.values():
        one.points.sort(key=lambda point: point.x)
    return [asdict(one) for one in series.values()]
