"""A comparison as tables: cost, accuracy, time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leanconv.evaluation.paired import points
from leanconv.report.compare.results import Comparison, Result
from leanconv.system.text_table import table

WIDEST = 31  # characters of the name of an original
CUT = "..."


@dataclass(frozen=True)
class Rows:
    """A table's cells; the first ``left`` columns are words."""

    title: str
    heads: list[str]
    cells: list[list[str]]
    left: int


def as_text(found: Comparison) -> str:
    parts = [table(one.heads, one.cells, left=one.left) for one in tables(found.results)]
    return "\n\n".join([*parts, *(["\n".join(found.remarks)] if found.remarks else [])])


def tables(results: Sequence[Result]) -> list[Rows]:
    """Those that have anything to show."""
    return [one for one in (_cost(results), _accuracy(results), _times(results)) if one.cells]


def _cost(results: Sequence[Result]) -> Rows:
    rows: list[list[str]] = []
    known: set[tuple[str, int]] = set()
    for result in results:
        if (result.source, result.macs_before) not in known:
            known.add((result.source, result.macs_before))
            counts = [_millions(result.macs_before), _millions(result.parameters_before)]
            rows.append([_cut(result.source), "", "the original", "", *counts, "", ""])
        rows.append(
            [
                result.folder,
                _cut(result.source),
                result.form,
                f"{result.speedup:.2f}x" if result.speedup >= 1 else f"{1 / result.speedup:.2f}x dearer",
                _millions(result.macs_after),
                _millions(result.parameters_after),
                f"{result.mean_error:.3f}",
                f"{result.max_error:.3f}",
            ]
        )
    heads = ["cost", "made from", "scheme", "fewer MACs", "MMACs", "M params", "mean error", "max error"]
    return Rows("Cost, and the errors of layers", heads, rows, 3)


def _cut(name: str) -> str:
    """Both ends of a long name."""
    half = (WIDEST - len(CUT)) // 2
    return name if len(name) <= WIDEST else name[:half] + CUT + name[-half:]


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f}"


def _accuracy(results: Sequence[Result]) -> Rows:
    rows = [
        [
            result.folder,
            score.label,
            f"{100 * score.value:.2f}",
            "-" if score.original is None else f"{100 * score.original:.2f}",
            "-" if score.lost is None else points(score.lost),
            "-" if score.interval is None else f"{points(score.interval.low)} to {points(score.interval.high)}",
            str(result.accuracy.images),
        ]
        for result in results
        if result.accuracy is not None
        for score in result.accuracy.scores
    ]
    heads = ["accuracy", "measure", "%", "original", "lost, points", "95 % interval", "images"]
    return Rows("Accuracy", heads, rows, 2)


def _times(results: Sequence[Result]) -> Rows:
    rows = [
        [
            result.folder,
            setting.runtime,
            str(setting.batch),
            "GPU" if setting.gpu else str(setting.threads),
            f"{timed.after.value:.2f}",
            f"{timed.before.value:.2f}",
            f"{timed.ratio.value:.2f}x",
            f"{timed.ratio.low:.2f} to {timed.ratio.high:.2f}" + (" noisy" if timed.noisy else ""),
        ]
        for result in results
        for setting, timed in result.times
    ]
    heads = ["time", "runtime", "batch", "threads", "ms", "original", "faster", "95 % interval"]
    return Rows("Milliseconds of a batch", heads, rows, 2)
