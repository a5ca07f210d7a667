"""``leanconv evaluate`` on detectors: one, two, COCO's metric, labels from a file, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.scenes import coloured, write_scenes

COMMON = "--workers 0 --device cpu --quiet"


def test_one_detector(scenes: Path, leanconv_command) -> None:
    code, out, err = leanconv_command(f"evaluate seer.py:blind --data data {COMMON}")
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    assert rows[2:6] == [
        ["red", "3", "100.00"],
        ["green", "3", "100.00"],
        ["blue", "3", "0.00"],
        ["mean", "9", "66.67"],
    ]
    assert out.splitlines()[-1] == "mAP@0.5 (VOC, all points), 12 images"
    code, out, err = leanconv_command(f"evaluate seer.py:blind --data data --metric voc11 --limit 4 --json {COMMON}")
    assert code == 0, err
    result = json.loads(out)
    assert result["map"] == pytest.approx(2 / 3)
    assert result["per_class"]["blue"] == {"objects": 1, "ap": 0.0}
    assert (result["images"], result["split"], result["metric"], result["model"]) == (
        4,
        "val",
        "voc11",
        "seer.py:blind",
    )


def test_two_detectors(scenes: Path, leanconv_command) -> None:
    code, out, err = leanconv_command(f"evaluate seer.py:build seer.py:blind --data data {COMMON}")
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    assert rows[4:6] == [["blue", "3", "100.00", "0.00", "+100.00"], ["mean", "9", "100.00", "66.67", "+33.33"]]
    assert "95 % interval of the loss +" in out
    code, out, err = leanconv_command(f"evaluate seer.py:build seer.py:blind --data data --json {COMMON}")
    assert code == 0, err
    result = json.loads(out)
    assert (result["map"]["original"], result["map"]["increase"]) == pytest.approx((1, 1 / 3))
    assert 0 <= result["map"]["low"] < 1 / 3 < result["map"]["high"]
    assert result["per_class"]["blue"]["ap"] == {"original": 1.0, "other": 0.0}


def test_cocos_metric(scenes: Path, leanconv_command) -> None:
    pytest.importorskip("pycocotools")
    pytest.importorskip("torchmetrics")
    code, out, err = leanconv_command(f"evaluate seer.py:build seer.py:blind --data data --metric coco {COMMON}")
    assert code == 0, err
    assert "+33.33" in out
    assert "interval" not in out
    code, out, err = leanconv_command(f"evaluate seer.py:build --data data --metric coco --json {COMMON}")
    assert code == 0, err
    result = json.loads(out)
    assert (result["map"], result["figures"]["map_75"], result["figures"]["map_large"]) == (1.0, 1.0, None)


def test_a_file_says_which_label_is_which_class(scenes: Path, leanconv_command) -> None:
    (scenes / "labels.json").write_text('{"red": 2, "green": 3, "blue": 4}')
    code, out, err = leanconv_command(f"evaluate seer.py:shifted --data data --classes labels.json --json {COMMON}")
    assert code == 0, err
    assert json.loads(out)["map"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "seer.py:build seer.py:classifier --data data",
            "seer.py:build is a detector and seer.py:classifier is a clas",
        ),
        (
            "seer.py:build --data data --metric map",
            "names the metric 'map', which does not exist; known: voc, voc11, coco",
        ),
        ("seer.py:build --data data --size 30", "--size is for classifiers"),
        ("seer.py:build --data data --views 10", "--views is for classifiers"),
        ("seer.py:classifier --data data --metric voc", "--metric is for detectors"),
        ("seer.py:build --data data --split train", "names the split 'train', which does not exist"),
        ("seer.py:build --data data --limit 1", "no image has an object to be found"),
        ("seer.py:shifted --data data", "seer.py:shifted answers the label 4, but the data has 3 classes"),
        (
            "ssdlite320_mobilenet_v3_large --weights none --num-classes 5 --data data",
            "tells 5 classes apart, background included, but the data has 3, which needs 4",
        ),
    ],
)
def test_refusals(arguments: str, message: str, scenes: Path, leanconv_command) -> None:
    code, out, err = leanconv_command(f"evaluate {arguments} {COMMON}")
    assert (code, out) == (2, "")
    assert message in err


def test_clipped_boxes_are_said(scenes: Path, leanconv_command) -> None:
    marks = b'{"width": 30, "height": 24, "objects": [{"label": 0, "box": [-3, 0, 9, 9]}]}'
    write_scenes(scenes / "data" / "val-0.tar", 12, **{"012_png": coloured(1, (0, 0, 9, 9)), "012_json": marks})
    code, out, err = leanconv_command(f"evaluate seer.py:build --data data --json {COMMON}")
    assert code == 0, err
    assert "warning: 1 boxes reached beyond their image and were clipped" in err
    assert (json.loads(out)["map"], json.loads(out)["clipped"]) == (1, 1)
