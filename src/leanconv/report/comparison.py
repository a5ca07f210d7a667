"""Several saved folders, compared: tables and the points of charts. No rendering."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leanconv.errors import LeanconvError
from leanconv.evaluation.paired import points
from leanconv.report.advice import remarks
from leanconv.report.facts import Facts, facts_of
from leanconv.report.measured import Score
from leanconv.system.text_table import table as text_table

WIDEST = 31  # characters of the name of an original
CUT = "..."


@dataclass(frozen=True)
class Comparison:
    """Results, sorted by original, the cheapest last; ``remarks`` say why they cannot be compared, and what to do."""

    results: tuple[Facts, ...]
    remarks: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"results": [result.to_json() for result in self.results], "remarks": list(self.remarks)}

    def __str__(self) -> str:
        texts = [text_table(table.heads, table.rows, left=table.left) for table in tables(self.results)]
        return "\n\n".join([*texts, *(["\n".join(self.remarks)] if self.remarks else [])])


def compare(folders: Sequence[str | Path]) -> Comparison:
    """Read what ``result.save``, ``bench --record`` and ``evaluate --record`` left in ``folders``."""
    if not folders:
        raise LeanconvError("no folder was given; give the saved folders to compare.")
    places: dict[Path, Path] = {}  # each once, however often and in whatever way it is named
    for folder in map(Path, folders):
        places.setdefault(folder.resolve(), folder)
    results = [facts_of(folder) for folder in places.values()]
    results.sort(key=lambda one: (one.source, one.macs_before, -one.macs_after, one.folder))
    return Comparison(tuple(results), tuple(remarks(results)))


@dataclass(frozen=True)
class Table:
    """The first ``left`` columns are words."""

    title: str
    heads: list[str]
    rows: list[list[str]]
    left: int


def tables(results: Sequence[Facts]) -> list[Table]:
    """Cost, accuracy and times, without empty tables."""
    return [table for table in (_cost(results), _accuracy(results), _times(results)) if table.rows]


def _cost(results: Sequence[Facts]) -> Table:
    rows: list[list[str]] = []
    known: set[tuple[str, int]] = set()
    for one in results:
        if (one.source, one.macs_before) not in known:
            known.add((one.source, one.macs_before))
            counts = [f"{count / 1e6:.2f}" for count in (one.macs_before, one.parameters_before)]
            rows.append([_cut(one.source), "", "the original", "", *counts, "", ""])
        ratio = f"{one.speedup:.2f}x" if one.speedup >= 1 else f"{1 / one.speedup:.2f}x more"
        counts = [f"{count / 1e6:.2f}" for count in (one.macs_after, one.parameters_after)]
        errors = [f"{one.mean_error:.3f}", f"{one.max_error:.3f}"]
        rows.append([one.folder, _cut(one.source), _kind(one), ratio, *counts, *errors])
    heads = ["cost", "made from", "scheme", "fewer MACs", "MMACs", "M params", "mean error", "max error"]
    return Table("Cost, and the errors of layers", heads, rows, 3)


def _kind(one: Facts) -> str:
    return f"{one.options['scheme']}{'' if one.tuned is None else ', tuned'}"


def _cut(name: str) -> str:
    """A long name without its middle."""
    half = (WIDEST - len(CUT)) // 2
    return name if len(name) <= WIDEST else name[:half] + CUT + name[-half:]


def _accuracy(results: Sequence[Facts]) -> Table:
    rows = []
    for one in results:
        for score in one.accuracy.scores if one.accuracy else ():
            original = "-" if score.original is None else f"{100 * score.original:.2f}"
            lost = "-" if score.lost is None else points(score.lost)
            span = "-" if score.interval is None else f"{points(score.interval.low)} to {points(score.interval.high)}"
            images = str(one.accuracy.images) if one.accuracy else ""
            rows.append([one.folder, score.label, f"{100 * score.value:.2f}", original, lost, span, images])
    heads = ["accuracy", "measure", "%", "original", "lost, points", "95 % interval", "images"]
    return Table("Accuracy", heads, rows, 2)


def _times(results: Sequence[Facts]) -> Table:
    rows = []
    for one in results:
        for timed in one.measurements:
            setting = [timed.runtime, str(timed.batch), "GPU" if timed.gpu else str(timed.threads)]
            medians = [f"{timed.after.value:.2f}", f"{timed.before.value:.2f}", f"{timed.ratio.value:.2f}x"]
            span = f"{timed.ratio.low:.2f} to {timed.ratio.high:.2f}{' noisy' if timed.noisy else ''}"
            rows.append([one.folder, *setting, *medians, span])
    heads = ["time", "runtime", "batch", "threads", "ms", "original", "faster", "95 % interval"]
    return Table("Milliseconds of a batch", heads, rows, 2)


# Of a result in one chart: the name of its series, that of the original's, and x of the original and of the result.
Places = Iterable[tuple[str, str, float, float]]


def against_macs(results: Sequence[Facts]) -> list[dict[str, Any]]:
    """x in millions of multiply-accumulates."""
    return _chart(results, lambda one: [(_kind(one), "", one.macs_before / 1e6, one.macs_after / 1e6)])


def against_time(results: Sequence[Facts]) -> list[dict[str, Any]]:
    """x in milliseconds of a batch; a series a setting."""

    def places(one: Facts) -> Places:
        for timed in one.measurements:
            yield f"{_kind(one)}, {timed.setting}", timed.setting, timed.before.value, timed.after.value

    return _chart(results, places)


def _chart(results: Sequence[Facts], places: Callable[[Facts], Places]) -> list[dict[str, Any]]:
    """Series of points, cheapest first; y in percent of the most important measure, ``low`` to ``high`` its interval,
    the original's share taken as known. Names say what the results were made from where that differs."""
    several = len({one.source for one in results}) > 1
    series: dict[tuple[str, bool], dict[str, Any]] = {}
    for one in results:
        score = one.accuracy.scores[0] if one.accuracy else None
        for name, setting, before, after in places(one) if score else ():
            assert score is not None
            low, high = _interval(score)
            key = (f"{one.source}, {name}" if several else name, False)
            series.setdefault(key, {"name": key[0], "original": False, "points": []})["points"].append(
                {"name": one.folder, "x": after, "y": 100 * score.value, "low": low, "high": high}
            )
            if score.original is not None:
                y = 100 * score.original
                name = ", ".join(word for word in (one.source if several or not setting else "", setting) if word)
                point = {"name": name, "x": before, "y": y, "low": y, "high": y}
                # Timed again with every folder: the first stands for all.
                series.setdefault((name, True), {"name": name, "original": True, "points": [point]})
    for made in series.values():
        made["points"].sort(key=lambda point: point["x"])
    return list(series.values())


def _interval(score: Score) -> tuple[float, float]:
    if score.interval is None or score.original is None:
        return 100 * score.value, 100 * score.value
    return 100 * (score.original - score.interval.high), 100 * (score.original - score.interval.low)
