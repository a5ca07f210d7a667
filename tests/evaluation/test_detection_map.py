"""Detectors run over scenes, and how precise they are: what they find, in whose labels, and which answers are none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from leanconv import LeanconvError
from leanconv.evaluation.class_names import detector_labels
from leanconv.evaluation.detection import Detector, class_outputs, detect_all, is_detector, read_scenes
from leanconv.evaluation.voc_ap import Answer, match, precisions
from leanconv.images.detection_data import VOC_CLASSES, Scenes, SceneSet, Target, find_scenes
from leanconv.network.layers.modules import blank
from leanconv.network.source import Source, build
from tests.support.scenes import COLOURS, Seer, coloured, write_scenes


def scenes_of(scenes: Path) -> Scenes:
    return find_scenes(scenes / "data")


def detect(model: nn.Module, data: SceneSet, **options: Any) -> tuple[list[Answer], list[Target]]:
    """What one detector finds."""
    detector = Detector("the model", model)
    (found,), targets = detect_all([detector], read_scenes(data, **options), len(data.scenes.classes), "cpu")
    return found, targets


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_found_in_every_scene(workers: int, scenes: Path) -> None:
    detections, targets = detect(Seer(), SceneSet(scenes_of(scenes)), batch=5, workers=workers)
    assert len(detections) == len(targets) == 12
    assert set(precisions(match(detections, targets, len(COLOURS)))) == {1.0}
    detections, targets = detect(Seer(blind=2), SceneSet(scenes_of(scenes)))
    assert precisions(match(detections, targets, len(COLOURS))) == pytest.approx([1, 0, 1])


def test_labels_of_the_network_become_those_of_the_data(scenes: Path) -> None:
    # The network says 2, 3, 4 for red, green, blue; what it calls 3 is not asked for.
    detector = Detector("seer", Seer(shift=1), {2: 1, 4: 3})
    (detections,), targets = detect_all([detector], read_scenes(SceneSet(scenes_of(scenes))), 3, "cpu")
    assert precisions(match(detections, targets, len(COLOURS))) == pytest.approx([1, 0, 1])
    assert sum(len(one["labels"]) for one in detections) == 6
    (detections,), _ = detect_all(
        [Detector("seer", Seer(shift=-1))], read_scenes(SceneSet(scenes_of(scenes))), 3, "cpu"
    )
    assert sum(len(one["labels"]) for one in detections) == 6  # 0 is background


def test_answers_that_are_none(scenes: Path) -> None:
    data = SceneSet(scenes_of(scenes))
    with pytest.raises(
        LeanconvError, match=r"the model answers the label 4, but the data has 3 classes; give --classes"
    ):
        detect(Seer(shift=1), data)
    with pytest.raises(LeanconvError, match="answers NaN or infinity"):
        detect(Seer(scale=math.inf), data)
    with pytest.raises(LeanconvError, match="raised TypeError on a batch of shape"):
        detect(nn.Conv2d(3, 3, 1), data)
    with pytest.raises(LeanconvError, match="returned a list where a dict with boxes, labels, scores for every image"):
        detect(nn.Identity(), data)


def test_pictures_that_cannot_be_used(scenes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = {"150_png": b"no picture", "150_json": b'{"width": 30, "height": 24, "objects": []}'}
    found = find_scenes(write_scenes(scenes / "more" / "val.tar", 150, **broken))
    bad: list[str] = []
    detections, targets = detect(Seer(), SceneSet(found), bad=bad)
    assert (len(detections), len(targets), bad) == (150, 150, ["val.tar/150.png"])
    assert "cannot read val.tar/150.png (UnidentifiedImageError" in capsys.readouterr().err
    other = {"012_png": coloured(1, (0, 0, 5, 5)), "012_json": b'{"width": 9, "height": 24, "objects": []}'}
    found = find_scenes(write_scenes(scenes / "few" / "val.tar", 12, **other))
    with pytest.raises(LeanconvError, match=r"1 of 13 images cannot be read \(val.tar/012.png\), more than 1 %"):
        detect(Seer(), SceneSet(found))
    assert "is 30 x 24 pixels, but its annotation is for 9 x 24" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "fasterrcnn_mobilenet_v3_large_320_fpn",
        "maskrcnn_resnet50_fpn",
        "retinanet_resnet50_fpn",
        "fcos_resnet50_fpn",
        "ssd300_vgg16",
        "ssdlite320_mobilenet_v3_large",
    ],
)
def test_torchvisions_detectors_say_how_many_classes(name: str) -> None:
    with blank():
        model = build(Source(library="torchvision", name=name, classes=7))
    assert is_detector(model)
    assert class_outputs(model) == 7


def test_a_detector_is_what_answers_like_one() -> None:
    assert is_detector(Seer().train())
    assert class_outputs(Seer()) is None
    for other in (nn.Conv2d(3, 4, 3), nn.Identity(), nn.Sequential(nn.Flatten(), nn.Linear(3, 2))):
        assert not is_detector(other)


def test_names_of_trained_weights() -> None:
    import torchvision

    names = torchvision.models.get_weight("FasterRCNN_ResNet50_FPN_Weights.DEFAULT").meta["categories"]
    labels = detector_labels("net", 91, names, VOC_CLASSES, None)
    assert labels is not None
    assert {names[theirs]: VOC_CLASSES[ours - 1] for theirs, ours in labels.items()}["tv"] == "tvmonitor"
    assert sorted(labels.values()) == list(range(1, 21))
    assert detector_labels("own", 21, names, VOC_CLASSES, None) is None
    with pytest.raises(LeanconvError, match="net knows no emu by its weights' categories; give data with classes it"):
        detector_labels("net", 91, names, ["cat", "emu"], None)
    with pytest.raises(LeanconvError, match="own tells 9 classes apart, background included, but the data has 20"):
        detector_labels("own", 9, names, VOC_CLASSES, None)
