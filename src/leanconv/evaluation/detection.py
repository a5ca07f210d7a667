"""Running detectors over annotated images, and COCO's mean average precision of what they find."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.errors import LeanconvError, listing
from leanconv.evaluation.classification import as_taken, judging
from leanconv.evaluation.voc_ap import Answer, difficult_of
from leanconv.images.detection_data import SceneSet, Target
from leanconv.images.loading import read_batches
from leanconv.network.torchvision_detectors import kind_of
from leanconv.network.user_model import model_failed

KEYS = ("boxes", "labels", "scores")
# Images of any size, float32 3 x height x width, and as many targets.
Batch = tuple[list[Tensor], list[Target]]


@dataclass(frozen=True)
class Detector:
    """``labels``: the network's label -> the data's, where they differ; what is not in it is passed over."""

    name: str
    model: nn.Module
    labels: Mapping[int, int] | None = None


def are_detectors(named: Sequence[tuple[str, nn.Module]]) -> bool:
    """Whether all of these are; LeanconvError where only some are."""
    kinds = [(name, is_detector(model)) for name, model in named]
    if len({kind for _, kind in kinds}) > 1:
        each = [f"{name} is a {'detector' if kind else 'classifier'}" for name, kind in kinds]
        raise LeanconvError(f"{' and '.join(each)}; give two of a kind.")
    return kinds[0][1]


def is_detector(model: nn.Module) -> bool:
    """Whether ``model`` answers a list of images with boxes, labels and scores: by its type, else by asking it."""
    if kind_of(model) is not None:
        return True
    weight = next(model.parameters(), torch.zeros(()))
    try:
        with judging(model):
            answer = model([as_taken(model, torch.zeros(3, 224, 224, device=weight.device))])
    except Exception:  # most networks take a tensor, and say so in their own way
        return False
    return _is_answer(answer, 1)


def class_outputs(model: nn.Module) -> int | None:
    """Classes a detector of torchvision's make tells apart, background included; None where it does not say."""
    predictor = getattr(getattr(model, "roi_heads", None), "box_predictor", None)
    head = getattr(getattr(model, "head", None), "classification_head", None)
    scores = getattr(predictor, "cls_score", None)
    if isinstance(scores, nn.Module):
        return next(
            (layer.out_features for layer in reversed([*scores.modules()]) if isinstance(layer, nn.Linear)), None
        )
    count = getattr(head, "num_classes", getattr(head, "num_columns", None))
    return count if isinstance(count, int) else None


def read_scenes(
    scene_set: SceneSet,
    numbers: Sequence[int] | None = None,
    *,
    batch: int = 8,
    **reading: Any,
) -> Iterator[Batch]:
    """Images and targets of the scenes with these ``numbers``, all by default. ``reading``: as of ``read_batches``."""
    numbers = range(len(scene_set)) if numbers is None else numbers
    names = [scene_set.scenes[number].picture.name for number in numbers]
    for pairs, _ in read_batches(numbers, scene_set.__getitem__, names, batch=batch, **reading):
        yield [image for image, _ in pairs], [target for _, target in pairs]


def detect_all(
    detectors: Sequence[Detector],
    batches: Iterable[Batch],
    classes: int,
    device: torch.device | str,
    *,
    step: Callable[[], None] = lambda: None,
) -> tuple[list[list[Answer]], list[Target]]:
    """What every detector finds in the same images, on the CPU, and what there is: objects of ``classes`` classes."""
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
    return [_checked(detector, {key: one[key].cpu() for key in KEYS}, classes) for one in answer]


def _is_answer(answer: object, images: int) -> bool:
    return (
        isinstance(answer, (list, tuple))
        and len(answer) == images
        and all(isinstance(one, Mapping) and all(isinstance(one.get(key), Tensor) for key in KEYS) for one in answer)
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
    object_ = labels > 0  # 0 is background
    return {"boxes": boxes[object_], "labels": labels[object_], "scores": scores[object_]}


def coco_map(found: Sequence[Answer], targets: Sequence[Answer]) -> dict[str, Any]:
    """COCO's twelve figures by torchmetrics' names (``map`` is the mean over IoU 0.50 to 0.95) and ``per_class``, label
    -> AP; NaN where there is nothing to be found. Difficult objects count as crowds, the best 100 of an image's
    detections count."""
    try:
        import pycocotools  # noqa: F401
        from torchmetrics.detection import MeanAveragePrecision
    except ImportError:
        raise LeanconvError(
            "COCO's mAP needs torchmetrics and pycocotools: pip install 'leanconv[detection]'."
        ) from None
    metric = MeanAveragePrecision(class_metrics=True)
    metric.update(
        [{key: each[key].cpu() for key in KEYS} for each in found],
        [
            {"boxes": one["boxes"].cpu(), "labels": one["labels"].cpu(), "iscrowd": difficult_of(one).long()}
            for one in targets
        ],
    )
    values = metric.compute()
    labels = values.pop("classes").reshape(-1).tolist()
    per_class, _ = values.pop("map_per_class").reshape(-1).tolist(), values.pop("mar_100_per_class")
    figures: dict[str, Any] = {name: _present(float(value)) for name, value in values.items()}
    return {**figures, "per_class": dict(zip(labels, map(_present, per_class), strict=True))}


def _present(value: float) -> float:
    return math.nan if value < 0 else value  # COCO writes -1 for what there is none of
