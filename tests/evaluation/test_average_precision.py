"""Mean average precision: by hand, against COCO's own, and between two detectors."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

from leanconv import LeanconvError
from leanconv.evaluation.detection import coco_map
from leanconv.evaluation.voc_ap import match, mean_over_classes, paired_loss, precisions
from tests.support.scenes import Image_


def objects(*boxes: tuple[float, ...], labels: list[int] | None = None, difficult: tuple[int, ...] = ()) -> Image_:
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.tensor(labels or [1] * len(boxes)),
        "difficult": torch.tensor([number in difficult for number in range(len(boxes))]),
    }


def found(*boxes: tuple[float, ...], scores: list[float] | None = None, labels: list[int] | None = None) -> Image_:
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.tensor(labels or [1] * len(boxes)),
        "scores": torch.tensor([1 - 0.01 * number for number in range(len(boxes))] if scores is None else scores),
    }


# Boxes that do not overlap.
A, B, C, NOWHERE = (0, 0, 10, 10), (20, 0, 30, 10), (40, 0, 50, 10), (60, 60, 70, 70)


def by_class(found_: list[Image_], targets: list[Image_], classes: list[str], *, iou: float = 0.5) -> dict[str, float]:
    return dict(zip(classes, precisions(match(found_, targets, len(classes), iou)), strict=True))


def mean_ap(found_: list[Image_], targets: list[Image_], classes: list[str], *, eleven_point: bool = False) -> float:
    return mean_over_classes(precisions(match(found_, targets, len(classes)), 11 if eleven_point else None))


def both(detections: list[Image_], targets: list[Image_]) -> tuple[float, float]:
    """All-point and eleven-point AP of the only class."""
    return (
        mean_ap(detections, targets, ["thing"]),
        mean_ap(detections, targets, ["thing"], eleven_point=True),
    )


# By hand.


def test_perfect_detections_and_none() -> None:
    targets = [objects(A, B), objects(), objects(C)]
    assert both([found(A, B), found(), found(C)], targets) == pytest.approx((1, 1))
    assert both([found(), found(), found()], targets) == (0, 0)
    assert both([found(NOWHERE), found(A), found()], targets) == (0, 0)


def test_a_curve_by_hand() -> None:
    """Right, wrong, right, wrong, right of four objects: precision 1, 1/2, 2/3, 2/4, 3/5 at recall 1/4 to 3/4."""
    targets = [objects(A, B), objects(A, B)]
    detections = [found(A, B, scores=[0.9, 0.5]), found(NOWHERE, A, NOWHERE, scores=[0.8, 0.7, 0.6])]
    area = 0.25 * 1 + 0.25 * 2 / 3 + 0.25 * 3 / 5
    eleven = (3 * 1 + 3 * 2 / 3 + 2 * 3 / 5) / 11  # recalls 0 to 0.2, 0.3 to 0.5, 0.6 and 0.7; none from 0.8
    assert both(detections, targets) == pytest.approx((area, eleven))


def test_the_best_precision_at_a_recall_or_beyond_counts() -> None:
    """Wrong, right, right: precision 0, 1/2, 2/3; at recall 1/2 the 2/3 to come counts."""
    assert both([found(NOWHERE, A, B)], [objects(A, B)]) == pytest.approx((2 / 3, 2 / 3))


def test_an_object_found_twice_is_a_false_detection() -> None:
    """Right, wrong, right: precision 1, 1/2, 2/3 at recall 1/2, 1/2, 1."""
    assert both([found(A, A, B)], [objects(A, B)]) == pytest.approx((0.5 + 0.5 * 2 / 3, (6 * 1 + 5 * 2 / 3) / 11))
    assert both([found(A, A)], [objects(A)]) == pytest.approx((1, 1))  # nothing is left to be found


def test_a_recall_of_three_tenths_reaches_three_tenths() -> None:
    """0.1 * 3 is more than 0.3 in floating point."""
    targets = [objects(A) for _ in range(10)]
    detections = [found(A) if number < 3 else found() for number in range(10)]
    assert both(detections, targets) == pytest.approx((0.3, 4 / 11))


def test_difficult_objects_are_neither_hits_nor_misses() -> None:
    targets = [objects(A, B, difficult=(1,))]
    assert both([found(A)], targets) == pytest.approx((1, 1))
    assert both([found(B, B, A)], targets) == pytest.approx((1, 1))  # even twice, even first
    assert both([found(NOWHERE, B, A)], targets) == pytest.approx((0.5, 0.5))
    # Nearest to the difficult one, and enough on the other: it belongs to the difficult one.
    near = [objects((0, 0, 10, 10), (1, 0, 11, 10), difficult=(1,))]
    assert both([found((1, 0, 11, 10))], near) == (0, 0)


def test_a_detection_belongs_to_the_nearest_object_only() -> None:
    """The second is nearest to the object already found: false, though it would do for the other."""
    targets = [objects((0, 0, 10, 10), (2, 0, 12, 10))]
    second = (0.5, 0, 10.5, 10)
    assert match([found((0, 0, 10, 10), second)], targets, 1)[0].hit.tolist() == [True, False]
    assert match([found(second)], targets, 1)[0].hit.tolist() == [True]


def test_overlap_is_enough_from_the_threshold_on() -> None:
    half = (0, 0, 5, 10)  # IoU with A exactly 1/2; with a pixel added to sides it would be more
    assert both([found(half)], [objects(A)]) == pytest.approx((1, 1))
    assert both([found((0, 0, 4.99, 10))], [objects(A)]) == (0, 0)
    assert by_class([found(half)], [objects(A)], ["thing"], iou=0.51) == {"thing": 0}


def test_classes_are_apart_and_absent_ones_left_out() -> None:
    targets = [objects(A, B, C, labels=[1, 2, 3], difficult=(2,))]
    result = by_class([found(A, A, B, labels=[1, 2, 2])], targets, ["a", "b", "c", "d"])
    assert {name: result[name] for name in "ab"} == pytest.approx({"a": 1, "b": 0.5})
    assert all(math.isnan(result[name]) for name in "cd")
    assert mean_ap([found(A, A, B, labels=[1, 2, 2])], targets, ["a", "b", "c", "d"]) == pytest.approx(0.75)


def test_detections_of_one_score_count_together() -> None:
    for detections in (found(A, NOWHERE, scores=[0.5, 0.5]), found(NOWHERE, A, scores=[0.5, 0.5])):
        assert both([detections], [objects(A)]) == pytest.approx((0.5, 0.5))


def test_no_objects_and_uneven_lists() -> None:
    for targets in ([objects()], [objects(A, difficult=(0,))]):
        with pytest.raises(LeanconvError, match="no image has an object to be found"):
            mean_ap([found(A)], targets, ["thing"])
    with pytest.raises(LeanconvError, match="no image has an object"):
        mean_ap([], [], ["thing"])
    with pytest.raises(LeanconvError, match="detections of 1 images but objects of 2"):
        by_class([found()], [objects(A), objects()], ["thing"])


# Against others, and against itself.


# Objects of every class: a prime number each, so that no recall but 1 is one of COCO's 101, up to rounding.
COUNTS = (53, 59, 61)
NAMES = ["a", "b", "c"]


def random_scenes(seed: int, images: int = 30, crowded: bool = False) -> tuple[list[Image_], list[Image_]]:
    """Objects on a grid, apart from each other, and detections near them, of any class, in any order."""
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.repeat([1, 2, 3], COUNTS))
    detections, targets = [], []
    for ours in np.array_split(labels, images):
        cells = generator.choice(16, len(ours), replace=False)
        corners = np.stack([cells % 4, cells // 4], axis=1) * 50.0
        sides = generator.uniform(20, 45, (len(ours), 2))
        boxes = np.concatenate([corners, corners + sides], axis=1)
        chosen = generator.integers(0, len(ours), 3 * len(ours))
        near = boxes[chosen] + generator.normal(0, 4, (len(chosen), 4))
        guessed = np.where(generator.random(len(chosen)) < 0.8, ours[chosen], generator.integers(1, 4, len(chosen)))
        scores = generator.random(len(chosen))
        if crowded:
            scores = np.round(scores, 1)
        targets.append(
            {
                "boxes": torch.from_numpy(boxes),
                "labels": torch.from_numpy(ours),
                "difficult": torch.from_numpy(generator.random(len(ours)) < (0.2 if crowded else 0)),
            }
        )
        detections.append(
            {"boxes": torch.from_numpy(near), "labels": torch.from_numpy(guessed), "scores": torch.from_numpy(scores)}
        )
    return detections, targets


@pytest.mark.parametrize("seed", range(3))
def test_agreement_with_coco(seed: int) -> None:
    """Objects apart, none difficult: both match alike. COCO takes the mean at 101 recalls for the area. Of a curve p
    that falls from p(0) <= 1, the sums of p(k / 100) / 100 without the first and without the last term enclose the
    area, so that the mean differs from it by 0.01 at most."""
    pytest.importorskip("pycocotools")
    pytest.importorskip("torchmetrics")
    detections, targets = random_scenes(seed)
    theirs = coco_map(detections, targets)
    assert 0.2 < theirs["map_50"] < 0.9
    at_101 = precisions(match(detections, targets, 3), 101)
    assert sum(at_101) / 3 == pytest.approx(theirs["map_50"], abs=1e-6)
    assert abs(mean_ap(detections, targets, NAMES) - theirs["map_50"]) <= 0.01


def test_cocos_figures() -> None:
    pytest.importorskip("pycocotools")
    pytest.importorskip("torchmetrics")
    targets = [objects(A, B, labels=[1, 2], difficult=(1,)), objects()]
    figures = coco_map([found(A, B, labels=[1, 2]), found()], targets)
    assert figures["map"] == figures["per_class"][1] == 1
    assert math.isnan(figures["per_class"][2])  # only a crowd
    assert math.isnan(figures["map_large"])
    assert coco_map([found(), found()], targets)["map"] == 0


@pytest.mark.parametrize("name", ["pycocotools", "torchmetrics.detection"])
def test_without_the_packages_a_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(LeanconvError, match=r"needs torchmetrics and pycocotools: pip install 'leanconv\[detection\]'"):
        coco_map([found(A)], [objects(A)])


@pytest.mark.parametrize("points", [None, 11])
def test_the_order_of_images_does_not_matter(points: int | None) -> None:
    detections, targets = random_scenes(5, crowded=True)
    expected = precisions(match(detections, targets, 3), points)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(targets))
        shuffled = match([detections[i] for i in order], [targets[i] for i in order], 3)
        assert precisions(shuffled, points) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("points", [None, 11])
def test_images_drawn_anew_are_images_repeated(points: int | None) -> None:
    detections, targets = random_scenes(6, crowded=True)
    draws = np.random.default_rng(0).multinomial(30, np.full(30, 1 / 30), size=5).T
    drawn = [one.average_precision(draws, points) for one in match(detections, targets, 3)]
    for number in range(5):
        repeated = np.repeat(np.arange(30), draws[:, number])
        matches = match([detections[i] for i in repeated], [targets[i] for i in repeated], 3)
        assert [one[number] for one in drawn] == pytest.approx(precisions(matches, points), abs=1e-12)


def test_the_interval_of_a_loss() -> None:
    detections, targets = random_scenes(7)
    generator = torch.Generator().manual_seed(0)
    worse = [
        {**one, "boxes": one["boxes"] + 4 * torch.randn(one["boxes"].shape, generator=generator)} for one in detections
    ]
    a, b = match(detections, targets, 3), match(worse, targets, 3)
    loss, low, high = paired_loss(a, b)
    assert loss == pytest.approx(mean_ap(detections, targets, NAMES) - mean_ap(worse, targets, NAMES))
    assert 0 < low < loss < high
    back = paired_loss(b, a)
    assert back == pytest.approx((-loss, -high, -low))
    assert paired_loss(a, b) == (loss, low, high)
    assert paired_loss(a, a) == (0, 0, 0)


def test_the_interval_is_as_wide_as_images_make_it() -> None:
    """One object an image, found or not: AP is the share of images found, and its interval binomial."""
    targets = [objects(A)] * 400
    some = [found(A, scores=[1.0]) if number % 4 else found() for number in range(400)]
    loss, low, high = paired_loss(match([found(A)] * 400, targets, 1), match(some, targets, 1), resamples=4000)
    assert loss == pytest.approx(0.25)
    deviation = math.sqrt(0.25 * 0.75 / 400)
    assert (low, high) == pytest.approx((0.25 - 1.96 * deviation, 0.25 + 1.96 * deviation), abs=0.006)
