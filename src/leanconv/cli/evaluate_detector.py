"""``leanconv evaluate`` for detectors: mean average precision, of one or of two side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanconv.cli.json_output import print_json
from leanconv.errors import LeanconvError, listing, unknown_name, warn

if TYPE_CHECKING:
    import torch

    from leanconv.cli.networks import Opened
    from leanconv.evaluation.detection import Found
    from leanconv.evaluation.paired import Change
    from leanconv.evaluation.voc_ap import Matches

# Name -> what it is called, and how many recalls VOC's is the mean of.
METRICS = {
    "voc": ("mAP@0.5 (VOC, all points)", None),
    "voc11": ("mAP@0.5 (VOC, 11 points)", 11),
    "coco": ("mAP@0.5:0.95 (COCO)", None),
}
# What COCO, and so torchvision's weights, call VOC's classes.
SYNONYMS = {
    "aeroplane": "airplane",
    "diningtable": "dining table",
    "motorbike": "motorcycle",
    "pottedplant": "potted plant",
    "sofa": "couch",
    "tvmonitor": "tv",
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options that mean something for detectors."""

    data: str
    split: str | None
    metric: str
    classes: Path | None
    limit: int | None
    batch: int
    workers: int
    device: torch.device
    record: Path | None
    as_json: bool
    quiet: bool


def evaluate_detectors(specs: Sequence[str], networks: Sequence[Opened], asked: Asked) -> None:
    from leanconv.evaluation.detection import Detector, class_outputs, detect_all
    from leanconv.evaluation.voc_ap import no_objects
    from leanconv.images.detection_data import SceneSet, find_scenes, splits
    from leanconv.images.find import HELD_OUT
    from leanconv.storage.records import write_record

    if asked.metric not in METRICS:
        raise unknown_name(asked.metric, METRICS, what="metric", where="--metric")
    split = asked.split or next((name for name in HELD_OUT if name in splits(asked.data)), None)
    scenes = find_scenes(asked.data, split=split)
    if scenes.remark:
        warn(scenes.remark)
    scenes = scenes.spread(asked.limit or len(scenes))
    if not any(bool((~scene.objects.difficult).any()) for scene in scenes):
        raise no_objects()
    outputs = [class_outputs(network.model) for network in networks]
    categories = [_categories(network.preset) for network in networks]
    known = next((names for names in categories if names), None)
    detectors = [
        Detector(spec, network.model, _labels(spec, count, names, known, scenes.classes, asked.classes))
        for spec, network, count, names in zip(specs, networks, outputs, categories, strict=True)
    ]
    bad: list[str] = []
    found, targets = detect_all(
        detectors,
        SceneSet(scenes),
        asked.device,
        batch=asked.batch,
        workers=asked.workers,
        progress=not asked.quiet,
        bad=bad,
    )
    about = {
        "metric": asked.metric,
        "data": asked.data,
        "split": split,
        "images": len(targets),
        "clipped": scenes.clipped,
        "dropped": scenes.dropped,
        "unreadable": bad,
    }
    measured = [
        _measured(spec, one, targets, scenes.classes, asked.metric) for spec, one in zip(specs, found, strict=True)
    ]
    result = {**_as_json(measured, scenes.classes, asked.metric), **about}
    if asked.record is not None:
        write_record(asked.record, "evaluation", result)
    if asked.as_json:
        print_json(result)
    else:
        print(_as_text(measured, scenes.classes, asked.metric))


def _categories(preset: str | None) -> list[str] | None:
    """What the labels of trained weights are called, from 0."""
    if preset is None:
        return None
    import torchvision

    names: list[str] | None = torchvision.models.get_weight(preset).meta.get("categories")
    return names


def _labels(
    spec: str,
    outputs: int | None,
    categories: Sequence[str] | None,
    others: Sequence[str] | None,
    classes: Sequence[str],
    file: Path | None,
) -> Mapping[int, int] | None:
    """The network's labels -> the data's, None where they are the same.

    By --classes, by the names in the weights' ``categories``, or by the ``others`` of the network it is compared with.
    """
    if file is not None:
        from leanconv.evaluation.class_names import class_indices
        from leanconv.images import Picture

        indices = class_indices([Picture("", name, name) for name in classes], file)  # as if of a picture each
        if outputs is not None:
            indices.check(outputs)
        return {indices[name]: label for label, name in enumerate(classes, start=1)}
    fits = outputs is None or outputs == len(classes) + 1
    names = categories if categories is not None or fits else others
    if names is not None and (outputs is None or len(names) == outputs):
        known = {name: label for label, name in enumerate(names)}
        ours = [name if name in known else SYNONYMS.get(name, name) for name in classes]
        missing = [name for name in ours if name not in known]
        if missing:
            raise LeanconvError(
                f"{spec} knows no {listing(missing, 3)} by its weights' categories; give data with classes it knows, "
                "or --classes FILE, a JSON of {name: label}."
            )
        return {known[name]: label for label, name in enumerate(ours, start=1)}
    if not fits:
        raise LeanconvError(
            f"{spec} tells {outputs} classes apart, background included, but the data has {len(classes)}, which needs "
            f"{len(classes) + 1}; give a network for these, or --classes FILE, a JSON of {{name: label}}."
        )
    return None


@dataclass(frozen=True)
class Measured:
    """A detector's AP a class, NaN where there is nothing to be found; ``figures`` are what else the metric gives."""

    spec: str
    precisions: Sequence[float]
    mean: float
    matches: Sequence[Matches]
    figures: dict[str, float | None]

    @property
    def objects(self) -> list[int]:
        return [int(one.objects.sum()) for one in self.matches]


def _measured(
    spec: str, found: Sequence[Found], targets: Sequence[Found], classes: Sequence[str], metric: str
) -> Measured:
    from leanconv.evaluation.detection import coco_map
    from leanconv.evaluation.voc_ap import match, mean_over_classes, precisions

    matches = match(found, targets, len(classes))
    if metric != "coco":
        values = precisions(matches, METRICS[metric][1])
        return Measured(spec, values, mean_over_classes(values), matches, {})
    figures = coco_map(found, targets)
    by_label = figures.pop("per_class")
    values = [by_label.get(label, math.nan) for label in range(1, len(classes) + 1)]
    return Measured(spec, values, figures["map"], matches, {name: _or_none(value) for name, value in figures.items()})


def _change(measured: Sequence[Measured], metric: str) -> Change | None:
    """From the first to the second, where the metric allows an interval: COCO's matches are not ours."""
    from leanconv.evaluation.paired import Change
    from leanconv.evaluation.voc_ap import paired_loss

    if metric == "coco":
        return None
    a, b = measured
    return Change(a.mean, b.mean, *paired_loss(a.matches, b.matches, METRICS[metric][1]))


def _as_text(measured: Sequence[Measured], classes: Sequence[str], metric: str) -> str:
    from leanconv.evaluation.paired import points
    from leanconv.system.text_table import table

    objects = measured[0].objects
    columns = [[*one.precisions, one.mean] for one in measured]
    cells = [[*classes, "mean"], [*map(str, objects), str(sum(objects))]]
    cells += [["-" if math.isnan(value) else f"{100 * value:.2f}" for value in column] for column in columns]
    heads = ["class", "objects", *(f"{one.spec} %" for one in measured)]
    said = f"{METRICS[metric][0]}, {len(measured[0].matches[0].objects)} images"
    if len(measured) == 2:
        heads.append("lost, points")
        cells.append(["-" if math.isnan(a) else points(a - b) for a, b in zip(*columns, strict=True)])
        change = _change(measured, metric)
        if change is not None:
            said += (
                f"; 95 % interval of the loss {points(change.low)} to {points(change.high)} points, within noise: "
                f"{'yes' if change.within_noise else 'no'}"
            )
    return f"{table(heads, list(zip(*cells, strict=True)))}\n{said}"


def _as_json(measured: Sequence[Measured], classes: Sequence[str], metric: str) -> dict[str, Any]:
    """One detector: ``map`` and APs are numbers; two: those of the original and of the other."""
    objects = measured[0].objects
    if len(measured) == 1:
        (one,) = measured
        each: list[Any] = [_or_none(value) for value in one.precisions]
        result: dict[str, Any] = {"model": one.spec, "map": one.mean, "figures": one.figures}
    else:
        a, b = measured
        pairs = zip(a.precisions, b.precisions, strict=True)
        each = [{"original": _or_none(before), "other": _or_none(after)} for before, after in pairs]
        change = _change(measured, metric)
        means = {"original": a.mean, "other": b.mean, "increase": a.mean - b.mean}
        result = {
            "original": a.spec,
            "other": b.spec,
            "map": means if change is None else change.to_json(),
            "figures": {"original": a.figures, "other": b.figures},
        }
    per_class = {name: {"objects": count, "ap": ap} for name, count, ap in zip(classes, objects, each, strict=True)}
    return {**result, "per_class": per_class}


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
