"""Running detectors over scenes, and COCO's mean average precision of what they find."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from leanconv.errors import LeanconvError, listing
from leanconv.evaluation.classification import NAMELESS, as_taken
from leanconv.evaluation.voc_ap import Found, difficult_of, mean_ap, voc_ap
from leanconv.images.detection_data import SceneSet, Target
from leanconv.images.loading import leave_out
from leanconv.network.torchvision_detectors import kind_of
from leanconv.network.user_model import model_failed
from leanconv.progress import reporter

__all__ = ["Detector", "Found", "class_outputs", "coco_map", "detect", "detect_all", "is_detector", "mean_ap", "voc_ap"]

KEYS = ("boxes", "labels", "scores")


@dataclass(frozen=True)
class Detector:
    """``labels``: the network's label -> the data's, where they differ; what is not in it is passed over."""

    name: str
    model: nn.Module
    labels: Mapping[int, int] | None = None


def is_detector(model: nn.Module) -> bool:
    """Whether ``model`` answers a list of images with boxes, labels and scores: by its type, else by asking it."""
    if kind_of(model) is not None:
        return True
    weight = next(model.parameters(), torch.zeros(()))
    training = model.training
    try:
        with torch.no_grad():
            answer = model.eval()([as_taken(model, torch.zeros(3, 224, 224, device=weight.device))])
    except Exception:  # most networks take a tensor, and say so in their own way
        return False
    finally:
        model.train(training)
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
    found = getattr(head, "num_classes", getattr(head, "num_columns", None))
    return found if isinstance(found, int) else None


@dataclass(frozen=True)
class _Unusable:
    """A picture, and what is wrong with it."""

    name: str
    reason: str


class _Tried(Dataset[tuple[Tensor, Target] | _Unusable]):
    """Scenes whose errors come back from workers as they are."""

    def __init__(self, scene_set: SceneSet):
        self._scene_set = scene_set

    def __len__(self) -> int:
        return len(self._scene_set)

    def __getitem__(self, index: int) -> tuple[Tensor, Target] | _Unusable:
        try:
            return self._scene_set[index]
        except Exception as error:  # a decoder can raise anything on a damaged file
            kind = "" if isinstance(error, LeanconvError) else f"{type(error).__name__}: "
            return _Unusable(self._scene_set.scenes[index].picture.name, f"{kind}{str(error).rstrip('.')}")


def detect(
    model: nn.Module,
    scene_set: SceneSet,
    device: torch.device | str,
    batch: int = 8,
    workers: int = 0,
    progress: bool = False,
) -> tuple[list[Found], list[Target]]:
    """What ``model`` finds in every scene, and what there is, on the CPU. Scenes that cannot be read are left out."""
    detector = [Detector(NAMELESS, model)]
    (found,), targets = detect_all(detector, scene_set, device, batch=batch, workers=workers, progress=progress)
    return found, targets


def detect_all(
    detectors: Sequence[Detector],
    scene_set: SceneSet,
    device: torch.device | str,
    *,
    batch: int = 8,
    workers: int = 0,
    progress: bool = False,
    bad: list[str] | None = None,
) -> tuple[list[list[Found]], list[Target]]:
    """What every detector finds in the same decoded images. Names of unusable ones go into ``bad``."""
    bad = [] if bad is None else bad
    models = [(detector, detector.model.to(device).eval()) for detector in detectors]
    found: list[list[Found]] = [[] for _ in models]
    targets: list[Target] = []
    pin = torch.device(device).type == "cuda"
    loader = DataLoader(_Tried(scene_set), batch, num_workers=workers, collate_fn=list, pin_memory=pin)
    with reporter(progress).stage("detecting", len(loader)) as stage, torch.no_grad():
        for items in loader:
            unusable = [(item.name, item.reason) for item in items if isinstance(item, _Unusable)]
            leave_out(unusable, bad, len(scene_set))
            pairs = [item for item in items if not isinstance(item, _Unusable)]
            images = [image.to(device) for image, _ in pairs]
            for kept, (detector, model) in zip(found, models, strict=True):
                kept += _answer(detector, model, images, len(scene_set.scenes.classes)) if images else []
            targets += [target for _, target in pairs]
            stage.advance()
    if not targets:
        raise LeanconvError("none of the images could be read; repair or replace them.")
    return found, targets


def _answer(detector: Detector, model: nn.Module, images: list[Tensor], classes: int) -> list[Found]:
    """Checked answers to a batch, with the data's labels."""
    try:
        answer = model([as_taken(model, image) for image in images])
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


def _checked(detector: Detector, found: dict[str, Tensor], classes: int) -> Found:
    boxes, labels, scores = found["boxes"].float(), found["labels"], found["scores"].float()
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
    kept = labels > 0  # 0 is background
    return {"boxes": boxes[kept], "labels": labels[kept], "scores": scores[kept]}


def coco_map(found: Sequence[Found], targets: Sequence[Found]) -> dict[str, Any]:
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
        [{key: one[key].cpu() for key in KEYS} for one in found],
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
