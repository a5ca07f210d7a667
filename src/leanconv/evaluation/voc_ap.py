"""Average precision as PASCAL VOC defines it, and the confidence interval of the difference of two detectors.

Boxes are continuous: IoU is intersection over union of areas, with no pixel added to a side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.ops import box_iou

from leanconv.errors import LeanconvError

# Of one image: boxes n x 4, labels n and scores n, as torchvision's detectors return them.
Answer = Mapping[str, Tensor]
Array = NDArray[Any]
# Draws times detections that the bootstrap computes at once: what fits the cache is twice as fast.
CELLS = 200_000


@dataclass(frozen=True)
class Matches:
    """The detections of one class that count, best score first, and the number of objects.

    ``image`` n: the image of a detection. ``hit`` n: whether it is the first to find its object. ``ends``: the last
    index of every score that has a hit; no threshold separates detections of one score. ``objects``: how many there
    are to find in every image. Which detection finds which object does not depend on other images, so a bootstrap over
    images only changes how often each counts.
    """

    image: Array
    hit: Array
    ends: Array
    objects: Array

    def average_precision(self, draws: Array, points: int | None = None) -> Array:
        """AP where image i counts ``draws[i]`` times (images x draws); NaN where there is no object.

        The area under the largest precision at a recall or beyond; with ``points``, its mean at that many recalls from
        0 to 1. Only ``ends`` matter: precision falls in between.
        """
        # ends x draws: detections and hits down to a score
        counted = np.cumsum(draws[self.image], axis=0)[self.ends]
        hits = np.cumsum(draws[self.image[self.hit]], axis=0)[np.cumsum(self.hit)[self.ends] - 1]
        precision = np.maximum.accumulate((hits / np.maximum(counted, 1))[::-1], axis=0)[::-1]
        objects = self.objects @ draws
        if points is None:
            values = (np.diff(hits, axis=0, prepend=0) * precision).sum(axis=0) / np.maximum(objects, 1)
        else:
            # in whole numbers, so that a recall of 3 in 10 reaches 0.3
            reached = (hits * (points - 1) >= step * objects for step in range(points))
            values = sum(np.where(there, precision, 0).max(axis=0, initial=0) for there in reached) / points
        return np.where(objects > 0, values, math.nan)


def match(found: Sequence[Answer], targets: Sequence[Answer], classes: int, iou: float = 0.5) -> list[Matches]:
    """Matches of labels 1 to ``classes``, by the rule of VOC's devkit: a detection belongs to the object of its class
    that it overlaps most, if by at least ``iou``. The best score of an object's detections is a hit, the others are
    false. Difficult objects and their detections do not count."""
    if len(found) != len(targets):
        raise LeanconvError(f"there are detections of {len(found)} images but objects of {len(targets)}.")
    columns = list(zip(*(_nearest(*pair) for pair in zip(found, targets, strict=True)), strict=True))
    if not columns:
        raise no_objects()
    labels, scores, overlap, nearest, object_labels, difficult = (np.concatenate(column) for column in columns)
    detections, objects = ([len(part) for part in column] for column in (columns[0], columns[4]))
    image = np.repeat(np.arange(len(found)), detections)
    object_image = np.repeat(np.arange(len(found)), objects)
    nearest = nearest + np.repeat(np.cumsum([0, *objects])[:-1], detections)

    order = np.argsort(-scores, kind="stable")
    labels, scores, image = labels[order], scores[order], image[order]
    belongs = overlap[order] >= iou
    # One more object, not difficult, for the detections of images that have none.
    ignored = belongs & np.append(difficult, False)[nearest[order]]
    taken = np.flatnonzero(belongs & ~ignored)
    hit = np.zeros(len(order), dtype=bool)
    hit[taken[np.unique(nearest[order][taken], return_index=True)[1]]] = True

    results = []
    for label in range(1, classes + 1):
        ours = (labels == label) & ~ignored
        images = object_image[(object_labels == label) & ~difficult]
        counts = np.bincount(images, minlength=len(found))
        results.append(Matches(image[ours], hit[ours], _ends(scores[ours], hit[ours]), counts))
    return results


def _nearest(found: Answer, target: Answer) -> tuple[Array, ...]:
    """Of every detection of an image: label, score, the largest IoU with an object of the same class, and the index of
    that object; of every object: label, and whether it is difficult."""
    boxes, labels, scores = (found[key].detach().cpu() for key in ("boxes", "labels", "scores"))
    objects = target["labels"].cpu()
    overlap, nearest = torch.full((len(labels),), -1.0).double(), torch.zeros(len(labels)).long()
    if len(objects) and len(labels):
        overlaps = box_iou(boxes.double(), target["boxes"].cpu().double())
        overlap, nearest = overlaps.masked_fill(labels[:, None] != objects, -1.0).max(dim=1)
    columns = (labels, scores.double(), overlap, nearest, objects, difficult_of(target))
    return tuple([np.asarray(column) for column in columns])


def difficult_of(target: Answer) -> Tensor:
    """n booleans, False where the target does not say."""
    return target["difficult"].cpu().bool() if "difficult" in target else torch.zeros(len(target["labels"])).bool()


def _ends(scores: Array, hit: Array) -> Array:
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True)) if len(scores) else np.zeros(0, dtype=int)
    ends: Array = last[np.diff(np.cumsum(hit)[last], prepend=0) > 0]
    return ends


def precisions(matches: Sequence[Matches], points: int | None = None) -> list[float]:
    """AP of every class, NaN for one without objects: the area under the curve (VOC since 2010), or its mean at
    ``points`` recalls (11 in 2007)."""
    return [float(each.average_precision(np.ones((len(each.objects), 1), dtype=int), points)[0]) for each in matches]


def mean_over_classes(values: Iterable[float]) -> float:
    """Without the NaN of classes that have no objects."""
    present = [value for value in values if not math.isnan(value)]
    if not present:
        raise no_objects()
    return sum(present) / len(present)


def no_objects() -> LeanconvError:
    return LeanconvError("no image has an object to be found (difficult ones do not count); give annotated images.")


def paired_loss(
    a: Sequence[Matches],
    b: Sequence[Matches],
    points: int | None = None,
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float, float]:
    """mAP of a minus mAP of b, with the percentile interval of a bootstrap over images, the same draws for both.

    Cost: O(resamples * detections), in memory a few arrays of CELLS numbers.
    """
    images = len(a[0].objects)
    generator = np.random.default_rng(seed)
    longest = max(1, *(len(each.image) for each in (*a, *b)))
    together = max(1, min(resamples, CELLS // max(longest, images)))
    differences = []
    for start in range(0, resamples, together):
        draws = generator.multinomial(images, np.full(images, 1 / images), size=min(together, resamples - start)).T
        draws = np.ascontiguousarray(draws, dtype=np.int32)
        both = [np.stack([each.average_precision(draws, points) for each in matches]) for matches in (a, b)]
        present = ~np.isnan(both[0])  # classes x draws; a class without objects in a draw is left out of both
        totals = [np.where(present, values, 0).sum(axis=0) for values in both]
        some = present.any(axis=0)
        differences.append((totals[0] - totals[1])[some] / present.sum(axis=0)[some])
    low, high = np.quantile(np.concatenate(differences), [(1 - level) / 2, (1 + level) / 2])
    loss = mean_over_classes(precisions(a, points)) - mean_over_classes(precisions(b, points))
    return loss, float(low), float(high)
