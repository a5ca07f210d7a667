"""Detectors on annotated images: what they find, and its mean average precision; of one or of two side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.errors import LeanconvError, listing
from leanconv.evaluation.classification import as_taken, judging
from leanconv.evaluation.paired import Change, points
from leanconv.evaluation.voc_ap import Answer, Matches, difficult_of, match, mean_over_classes, paired_loss, precisions
from leanconv.images.detection_data import SceneSet, Target
from leanconv.images.loading import read_batches
from leanconv.network.torchvision_detectors import kind_of
from leanconv.network.user_model import model_failed
from leanconv.system.text_table import table

KEYS = ("boxes", "labels", "scores")
# Images of any size, float32 3 x height x width, and as many targets.
Batch = tuple[list[Tensor], list[Target]]
# Metric -> its title, and the number of recalls that VOC's is the mean of.
METRICS = {
    "voc": ("mAP@0.5 (VOC, all points)", None),
    "voc11": ("mAP@0.5 (VOC, 11 points)", 11),
    "coco": ("mAP@0.5:0.95 (COCO)", None),
}


@dataclass(frozen=True)
class Detector:
    """``labels``: the network's label -> the data's, where they differ; other labels are ignored."""

    name: str
    model: nn.Module
    labels: Mapping[int, int] | None = None


def are_detectors(named: Sequence[tuple[str, nn.Module]]) -> bool:
    """Whether all of these are detectors; LeanconvError where only some are."""
    kinds = [is_detector(model) for _, model in named]
    if len(set(kinds)) > 1:
        parts = [
            f"{name} is a {'detector' if kind else 'classifier'}" for (name, _), kind in zip(named, kinds, strict=True)
        ]
        raise LeanconvError(f"{' and '.join(parts)}; give two of a kind.")
    return kinds[0]


def is_detector(model: nn.Module) -> bool:
    """Whether ``model`` answers a list of images with boxes, labels and scores: by its type, else by running it."""
    if kind_of(model) is not None:
        return True
    weight = next(model.parameters(), torch.zeros(()))
    try:
        with judging(model):
            answer = model([as_taken(model, torch.zeros(3, 224, 224, device=weight.device))])
    except Exception:  # most networks take a tensor, and fail in their own way
        return False
    return _is_answer(answer, 1)


def class_outputs(model: nn.Module) -> int | None:
    """The number of classes of a detector built like torchvision's, background included; None if it is not known."""
    predictor = getattr(getattr(model, "roi_heads", None), "box_predictor", None)
    head = getattr(getattr(model, "head", None), "classification_head", None)
    scores = getattr(predictor, "cls_score", None)
    if isinstance(scores, nn.Module):
        linear = [layer for layer in scores.modules() if isinstance(layer, nn.Linear)]
        return linear[-1].out_features if linear else None
    count = getattr(head, "num_classes", getattr(head, "num_columns", None))
    return count if isinstance(count, int) else None


def read_scenes(
    scene_set: SceneSet, indices: Sequence[int] | None = None, *, batch: int = 8, **reading: Any
) -> Iterator[Batch]:
    """Images and targets of the scenes at ``indices``, by default all. ``reading``: arguments of ``read_batches``."""
    indices = range(len(scene_set)) if indices is None else indices
    names = [scene_set.scenes[index].picture.name for index in indices]
    for pairs, _ in read_batches(indices, scene_set.__getitem__, names, batch=batch, **reading):
        yield [image for image, _ in pairs], [target for _, target in pairs]


def detect_all(
    detectors: Sequence[Detector],
    batches: Iterable[Batch],
    classes: int,
    device: torch.device | str,
    *,
    step: Callable[[], None] = lambda: None,
) -> tuple[list[list[Answer]], list[Target]]:
    """The detections of every detector on the same images, on the CPU, and the targets, of ``classes`` classes."""
    answers: list[list[Answer]] = [[] for _ in detectors]
    targets: list[Target] = []
    with judging(*(detector.model.to(device) for detector in detectors)):
        for pictures, objects in batches:
            images = [picture.to(device) for picture in pictures]
            for every, detector in zip(answers, detectors, strict=True):
                every += _answer(detector, images, classes) if images else []
            targets += objects
            step()
    if not targets:
        raise LeanconvError("none of the images could be read; repair or replace them.")
    return answers, targets


def _answer(detector: Detector, images: list[Tensor], classes: int) -> list[Answer]:
    """Checked answers to a batch, with the data's labels."""
    try:
        answer = detector.model([as_taken(detector.model, image) for image in images])
    except Exception as error:
        raise LeanconvError(f"{detector.name}: {model_failed(error, images)}") from error
    if not _is_answer(answer, len(images)):
        raise LeanconvError(
            f"{detector.name} returned a {type(answer).__name__} where a dict with {listing(KEYS)} for every image is "
            "needed; give a detector."
        )
    return [_checked(detector, {key: each[key].cpu() for key in KEYS}, classes) for each in answer]


def _is_answer(answer: object, images: int) -> bool:
    return (
        isinstance(answer, (list, tuple))
        and len(answer) == images
        and all(isinstance(each, Mapping) and all(isinstance(each.get(k), Tensor) for k in KEYS) for each in answer)
    )


def _checked(detector: Detector, answer: dict[str, Tensor], classes: int) -> Answer:
    boxes, labels, scores = answer["boxes"].float(), answer["labels"], answer["scores"].float()
    if not bool(torch.isfinite(boxes).all() and torch.isfinite(scores).all()):
        raise LeanconvError(f"{detector.name} answers NaN or infinity; check its weights.")
    if detector.labels is not None:
        labels = torch.tensor([detector.labels.get(label, 0) for label in labels.tolist()], dtype=torch.int64)
    beyond = labels[labels > classes]
    if len(beyond):
        raise LeanconvError(
            f"{detector.name} answers the label {int(beyond[0])}, but the data has {classes} classes; give --classes "
            "FILE, a JSON of {name: label}."
        )
    objects = labels > 0  # 0 is background
    return {"boxes": boxes[objects], "labels": labels[objects], "scores": scores[objects]}


def coco_map(found: Sequence[Answer], targets: Sequence[Answer]) -> dict[str, Any]:
    """COCO's twelve figures by torchmetrics' names (``map`` is the mean over IoU 0.50 to 0.95) and ``per_class``, label
    -> AP; NaN where there are no objects. Difficult objects count as crowds; the best 100 detections of an image count.
    """
    try:
        import pycocotools  # noqa: F401
        from torchmetrics.detection import MeanAveragePrecision
    except ImportError:
        raise LeanconvError(
            "COCO's mAP needs torchmetrics and pycocotools: pip install 'leanconv[detection]'."
        ) from None
    metric = MeanAveragePrecision(class_metrics=True)
    objects = [{**{key: each[key].cpu() for key in KEYS[:2]}, "iscrowd": difficult_of(each).long()} for each in targets]
    metric.update([{key: each[key].cpu() for key in KEYS} for each in found], objects)
    values = {name: value.double().where(value >= 0, math.nan) for name, value in metric.compute().items()}  # -1: none
    labels = values.pop("classes").reshape(-1).long().tolist()
    per_class, _ = values.pop("map_per_class").reshape(-1).tolist(), values.pop("mar_100_per_class")
    return {
        **{name: float(value) for name, value in values.items()},
        "per_class": dict(zip(labels, per_class, strict=True)),
    }


@dataclass(frozen=True)
class Precision:
    """A detector's AP of every class, NaN for one without objects, and their mean. ``figures``: the metric's others."""

    name: str
    ap: Sequence[float]
    map: float
    matches: Sequence[Matches] = field(repr=False)
    figures: Mapping[str, float | None]


@dataclass(frozen=True)
class DetectionScore:
    """The precision of one detector or two. Printed, a table.

    ``change``: from the first mAP to the second, with its interval; None for one detector, and for COCO's metric, which
    does its own matching. ``about``: the data and the images that could not be read.
    """

    classes: tuple[str, ...]
    metric: str
    detectors: tuple[Precision, ...]
    change: Change | None
    about: Mapping[str, Any]

    @property
    def objects(self) -> list[int]:
        """The number of objects of every class, without difficult ones."""
        return [int(each.objects.sum()) for each in self.detectors[0].matches]

    def to_json(self) -> dict[str, Any]:
        """``map`` and APs are numbers for one detector; for two, those of the original and of the other."""
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
        summary = f"{METRICS[self.metric][0]}, {self.about['images']} images"
        if self.change is not None:
            summary += (
                f"; 95 % interval of the loss {points(self.change.low)} to {points(self.change.high)} points, within "
                f"noise: {'yes' if self.change.within_noise else 'no'}"
            )
        return f"{table(heads, list(zip(*cells, strict=True)))}\n{summary}"


def score(
    names: Sequence[str],
    found: Sequence[Sequence[Answer]],
    targets: Sequence[Answer],
    classes: Sequence[str],
    metric: str,
    **about: Any,
) -> DetectionScore:
    """``found``: the detections of every detector in the images whose objects are ``targets``."""
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
