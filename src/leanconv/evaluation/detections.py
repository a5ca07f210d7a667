"""Mean average precision of one detector, or of two side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leanconv.evaluation.detection import coco_map
from leanconv.evaluation.paired import Change, points
from leanconv.evaluation.voc_ap import Answer, Matches, match, mean_over_classes, paired_loss, precisions
from leanconv.system.text_table import table

# Name -> what it is called, and how many recalls VOC's is the mean of.
METRICS = {
    "voc": ("mAP@0.5 (VOC, all points)", None),
    "voc11": ("mAP@0.5 (VOC, 11 points)", 11),
    "coco": ("mAP@0.5:0.95 (COCO)", None),
}


@dataclass(frozen=True)
class Precision:
    """A detector's AP of every class, NaN where there is nothing to be found, and its mean; ``figures`` are what else
    the metric gives."""

    name: str
    ap: Sequence[float]
    map: float
    matches: Sequence[Matches] = field(repr=False)
    figures: Mapping[str, float | None]


@dataclass(frozen=True)
class DetectionScore:
    """The precision of one detector or two. Printed, a table.

    ``change``: from the first mAP to the second, with its interval; None for one detector, and for COCO's metric,
    whose matches are not ours. ``about``: the data and the images that could not be read.
    """

    classes: tuple[str, ...]
    metric: str
    detectors: tuple[Precision, ...]
    change: Change | None
    about: Mapping[str, Any]

    @property
    def objects(self) -> list[int]:
        """How many are to be found, of every class."""
        return [int(each.objects.sum()) for each in self.detectors[0].matches]

    def to_json(self) -> dict[str, Any]:
        """One detector: ``map`` and APs are numbers; two: those of the original and of the other."""
        first = self.detectors[0]
        each: list[Any] = [_or_none(value) for value in first.ap]
        result: dict[str, Any] = {"model": first.name, "map": first.map, "figures": dict(first.figures)}
        if len(self.detectors) == 2:
            other = self.detectors[1]
            each = [{"original": a, "other": _or_none(b)} for a, b in zip(each, other.ap, strict=True)]
            means = {"original": first.map, "other": other.map, "increase": first.map - other.map}
            result = {
                "original": first.name,
                "other": other.name,
                "map": means if self.change is None else self.change.to_json(),
                "figures": {"original": dict(first.figures), "other": dict(other.figures)},
            }
        rows = zip(self.classes, self.objects, each, strict=True)
        per_class = {name: {"objects": count, "ap": ap} for name, count, ap in rows}
        return {**result, "per_class": per_class, "metric": self.metric, **self.about}

    def __str__(self) -> str:
        columns = [[*each.ap, each.map] for each in self.detectors]
        cells = [[*self.classes, "mean"], [*map(str, self.objects), str(sum(self.objects))]]
        cells += [["-" if math.isnan(value) else f"{100 * value:.2f}" for value in column] for column in columns]
        heads = ["class", "objects", *(f"{each.name} %" for each in self.detectors)]
        if len(columns) == 2:
            heads.append("lost, points")
            cells.append(["-" if math.isnan(a) else points(a - b) for a, b in zip(*columns, strict=True)])
        said = f"{METRICS[self.metric][0]}, {self.about['images']} images"
        if self.change is not None:
            said += (
                f"; 95 % interval of the loss {points(self.change.low)} to {points(self.change.high)} points, within "
                f"noise: {'yes' if self.change.within_noise else 'no'}"
            )
        return f"{table(heads, list(zip(*cells, strict=True)))}\n{said}"


def score(
    names: Sequence[str],
    found: Sequence[Sequence[Answer]],
    targets: Sequence[Answer],
    classes: Sequence[str],
    metric: str,
    **about: Any,
) -> DetectionScore:
    """``found``: for every detector, what it finds in the images whose objects are ``targets``."""
    measured = [_precision(name, each, targets, len(classes), metric) for name, each in zip(names, found, strict=True)]
    change = None
    if len(measured) == 2 and metric != "coco":
        a, b = measured
        change = Change(a.map, b.map, *paired_loss(a.matches, b.matches, METRICS[metric][1]))
    return DetectionScore(tuple(classes), metric, tuple(measured), change, about)


def _precision(name: str, found: Sequence[Answer], targets: Sequence[Answer], classes: int, metric: str) -> Precision:
    matches = match(found, targets, classes)
    if metric != "coco":
        values = precisions(matches, METRICS[metric][1])
        return Precision(name, values, mean_over_classes(values), matches, {})
    figures = coco_map(found, targets)
    by_label, mean = figures.pop("per_class"), figures["map"]
    values = [by_label.get(label, math.nan) for label in range(1, classes + 1)]
    return Precision(name, values, mean, matches, {name: _or_none(value) for name, value in figures.items()})


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
