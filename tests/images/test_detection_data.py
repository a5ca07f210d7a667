"""Annotated pictures: VOC, COCO and shards say the same, and what is wrong with them is said in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from leanconv import LeanconvError
from leanconv.evaluation.detection import read_scenes
from leanconv.images.detection_data import VOC_CLASSES, Scenes, SceneSet, find_scenes, splits
from tests.support.pictures import encoded, pack
from tests.support.scenes import TRUTH, Marks, coco, pairs, write_coco, write_shard, write_voc


def said(scenes: Scenes) -> list[Marks]:
    return [
        [
            (scenes.classes[label - 1], tuple(box), difficult)
            for label, box, difficult in zip(
                scene.target["labels"].tolist(),
                scene.target["boxes"].tolist(),
                scene.target["difficult"].tolist(),
                strict=True,
            )
        ]
        for scene in scenes
    ]


WRITERS: list[Callable[[Path], Path]] = [write_voc, write_coco, write_shard]


@pytest.mark.parametrize("write", WRITERS)
def test_every_form_says_the_same(write: Callable[[Path], Path], tmp_path: Path) -> None:
    scenes = find_scenes(write(tmp_path))
    assert said(scenes) == list(TRUTH.values())
    assert (len(scenes), scenes.clipped, scenes.dropped, scenes.remark) == (3, 0, 0, None)
    assert [(scene.width, scene.height) for scene in scenes] == [(30, 24)] * 3
    assert [scene.picture.read() for scene in scenes] == [encoded(seed=seed, form="JPEG") for seed in range(3)]
    objects = scenes[2].target
    assert (objects["boxes"].shape, objects["boxes"].dtype, objects["labels"].dtype) == (
        (0, 4),
        torch.float32,
        torch.int64,
    )


def test_the_order_of_classes(tmp_path: Path) -> None:
    assert find_scenes(write_voc(tmp_path)).classes == VOC_CLASSES
    assert find_scenes(write_coco(tmp_path)).classes == ("cat", "dog")  # ids 3 and 7
    shard = write_shard(tmp_path / "shards")
    assert find_scenes(shard).classes == ("cat", "dog")
    (shard.parent / "classes.json").write_text('["emu", "dog", "cat"]')
    scenes = find_scenes(shard)
    assert scenes.classes == ("emu", "dog", "cat")
    assert scenes[0].target["labels"].tolist() == [2, 3]


def test_numbers_in_shards_are_those_of_their_own_list(tmp_path: Path) -> None:
    shard = pack(tmp_path / "val-0.tar", pairs(numbers=["dog", "cat"]))
    (tmp_path / "classes.json").write_text('["dog", "cat"]')
    assert said(find_scenes(shard)) == list(TRUTH.values())


def test_splits_of_voc_and_of_shards(tmp_path: Path) -> None:
    folder = write_voc(tmp_path / "VOCdevkit", {name: TRUTH[name] for name in "ab"}, "train")
    write_voc(tmp_path / "VOCdevkit", {"c": []}, "val")
    (folder / "ImageSets" / "Main" / "cat_val.txt").write_text("c -1\n")
    for place in (folder, folder.parent, tmp_path):
        assert splits(place) == ["train", "val"]
        assert [scene.picture.name for scene in find_scenes(place, split="train")] == ["a.jpg", "b.jpg"]
        assert len(find_scenes(place)) == 3
    shards = tmp_path / "shards"
    for name in ("train-0", "train-1", "val-0"):
        pack(shards / f"{name}.tar", pairs())
    assert splits(shards) == ["train", "val"]
    assert len(find_scenes(shards, split="train")) == len(find_scenes(shards / "train-{0..1}.tar")) == 6
    assert len({scene.picture.name for scene in find_scenes(shards)}) == 9


def test_pictures_of_coco_beside_in_their_usual_place_or_where_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "coco" / "annotations").mkdir(parents=True)
    (tmp_path / "coco" / "val2017").mkdir()
    write_coco(tmp_path / "coco" / "val2017")
    file = (tmp_path / "coco" / "val2017" / "marks.json").rename(
        tmp_path / "coco" / "annotations" / "instances_val2017.json"
    )
    assert said(find_scenes(file)) == list(TRUTH.values())
    (tmp_path / "coco" / "val2017").rename(tmp_path / "elsewhere")
    with pytest.raises(LeanconvError, match=r"names 3 images that are not in .*a\.jpg.*give their folder"):
        find_scenes(file)
    assert said(find_scenes(f"{file}:{tmp_path / 'elsewhere'}")) == list(TRUTH.values())


@pytest.mark.parametrize("write", WRITERS)
def test_boxes_are_clipped_or_dropped_and_counted(write: Callable[..., Path], tmp_path: Path) -> None:
    marks: Marks = [
        ("cat", (-4, 3, 40, 9), False),
        ("dog", (10, 10, 10, 20), False),  # no width
        ("dog", (12, 10, 11, 20), False),  # turned round
        ("cat", (30, 0, 44, 9), False),  # all beyond
        ("dog", (1, 1, 2, 24.5), True),
    ]
    scenes = find_scenes(write(tmp_path, {"a": marks}))
    assert said(scenes) == [[("cat", (0, 3, 30, 9), False), ("dog", (1, 1, 2, 24), True)]]
    assert (scenes.clipped, scenes.dropped) == (2, 3)
    assert "2 boxes reached beyond their image and were clipped; 3 were empty" in (scenes.remark or "")


def test_sizes_nothing_says_are_the_pictures_own(tmp_path: Path) -> None:
    folder = write_voc(tmp_path)
    file = folder / "Annotations" / "a.xml"
    file.write_text(file.read_text().replace("<width>30</width>", "<width>0</width>"))
    assert said(find_scenes(folder)) == list(TRUTH.values())
    (folder / "JPEGImages" / "a.jpg").write_bytes(b"not a picture")
    with pytest.raises(LeanconvError, match=r"nothing says how large 'a\.jpg' is, and it cannot be read"):
        find_scenes(folder)


# What is refused.


def test_a_class_nobody_knows(tmp_path: Path) -> None:
    shard = write_shard(tmp_path)
    (shard.parent / "classes.json").write_text('["dog", "emu"]')
    with pytest.raises(LeanconvError, match=r"names the class 'cat', which is none of dog, emu; correct it, or give"):
        find_scenes(shard)
    (shard.parent / "classes.json").write_text('["dog", "cat", "dog"]')
    with pytest.raises(LeanconvError, match="several classes called dog"):
        find_scenes(shard)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("</annotation>", "", "cannot be read as a VOC annotation .no element found"),
        ("<name>dog</name>", "", "an object has no name"),
        ("<xmax>10</xmax>", "", "an object has no bndbox/xmax"),
        ("<xmax>10</xmax>", "<xmax>wide</xmax>", "could not convert string to float: 'wide'"),
        ("<xmax>10</xmax>", "<xmax>nan</xmax>", "has the box .*nan.*; repair it"),
    ],
)
def test_broken_xml(old: str, new: str, message: str, tmp_path: Path) -> None:
    folder = write_voc(tmp_path)
    file = folder / "Annotations" / "a.xml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(LeanconvError, match=rf"a\.xml' .*{message}"):
        find_scenes(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("images"), "'images' is missing or unknown"),
        (lambda data: data["annotations"][0].update(category_id=99), "99 is missing or unknown"),
        (lambda data: data["annotations"][0].update(image_id=17), "17 is missing or unknown"),
        (lambda data: data["annotations"][0].update(bbox=[1, 2, 3]), "not enough values"),
        (lambda data: data["images"].clear() or data["annotations"].clear(), "has no images"),
        (lambda data: data["categories"].append({"id": 9, "name": "dog"}), "several classes called dog"),
    ],
)
def test_broken_coco(change: Callable, message: str, tmp_path: Path) -> None:
    data = coco()
    change(data)
    file = write_coco(tmp_path)
    file.write_text(json.dumps(data))
    with pytest.raises(LeanconvError, match=message):
        find_scenes(file)
    file.write_text("{")
    with pytest.raises(LeanconvError, match="cannot be read as a COCO annotation"):
        find_scenes(file)
    with pytest.raises(LeanconvError, match="is one split by itself"):
        find_scenes(file, split="val")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.json": b"{"}, r"val-0\.tar/a\.json' cannot be read as an annotation"),
        ({"a.json": b'{"width": 30}'}, "'objects' is missing or unknown"),
        (
            {"a.json": b'{"objects": [{"label": 1, "box": [1, 2, 3, 4]}]}'},
            r"label 1 is a number, which needs a classes",
        ),
        ({"d.jpg": encoded(form="JPEG")}, r"no annotation for 1 of 4 images \(d\); add it, or remove them"),
        ({"d.json": b"{}"}, r"no picture for 1 of 4 images \(d\)"),
    ],
)
def test_broken_shards(members: dict[str, bytes], message: str, tmp_path: Path) -> None:
    with pytest.raises(LeanconvError, match=message):
        find_scenes(pack(tmp_path / "val-0.tar", {**pairs(), **members}))


def test_classes_files_that_do_not_fit(tmp_path: Path) -> None:
    shard = pack(tmp_path / "val-0.tar", pairs(numbers=["dog", "cat"]))
    for text, message in (
        ('["dog"]', "label 1 is none of 0 to 0"),
        ('{"dog": 1}', "is no list of names"),
        ("[", "cannot be read as a list of classes"),
    ):
        (tmp_path / "classes.json").write_text(text)
        with pytest.raises(LeanconvError, match=message):
            find_scenes(shard)


def test_places_without_scenes(tmp_path: Path) -> None:
    with pytest.raises(LeanconvError, match=r"does not exist; give a VOC folder .*, a COCO annotation .json, or .tar"):
        find_scenes(tmp_path / "nowhere")
    with pytest.raises(LeanconvError, match="holds no annotated images"):
        find_scenes(tmp_path)
    with pytest.raises(LeanconvError, match=r"has no pairs of id\.jpg and id\.json"):
        find_scenes(pack(tmp_path / "cls.tar", {"a.jpg": encoded(form="JPEG"), "a.cls": b"1"}))
    folder = write_voc(tmp_path)
    with pytest.raises(LeanconvError, match="names the split 'vall', which does not exist; did you mean val"):
        find_scenes(folder, split="vall")
    (folder / "ImageSets" / "Main" / "val.txt").write_text("\n")
    with pytest.raises(LeanconvError, match=r"split 'val' of .* has no images"):
        find_scenes(folder, split="val")
    (folder / "JPEGImages" / "a.jpg").unlink()
    with pytest.raises(LeanconvError, match=r"has no picture for 1 of 3 images \(a\)"):
        find_scenes(folder)
    (folder / "Annotations" / "a.xml").unlink()
    (folder / "Annotations" / "b.xml").unlink()
    with pytest.raises(LeanconvError, match=r"has no annotation for 1 of 2 images \(b\)"):
        find_scenes(folder)
    (tmp_path / "VOC2007" / "Annotations").mkdir(parents=True)
    with pytest.raises(LeanconvError, match="holds VOC2007, VOC2012; give one"):
        find_scenes(tmp_path)


# Tensors.


def test_items_are_images_and_targets(tmp_path: Path) -> None:
    scenes = find_scenes(write_shard(tmp_path))
    image, target = SceneSet(scenes)[1]
    assert (image.shape, image.dtype) == ((3, 24, 30), torch.float32)
    assert 0 <= image.min() < image.max() <= 1
    assert target["boxes"].tolist() == [[1, 2, 3, 4]]
    assert (target["labels"].tolist(), target["difficult"].tolist(), int(target["image_id"])) == ([1], [False], 1)
    images, targets = next(iter(read_scenes(SceneSet(scenes))))
    assert torch.equal(images[1], image)
    assert [len(one["boxes"]) for one in targets] == [2, 1, 0]


def test_spread_takes_scenes_from_everywhere(tmp_path: Path) -> None:
    scenes = find_scenes(write_shard(tmp_path))
    assert scenes.spread(2).scenes == scenes.scenes[:2]
    assert scenes.spread(9) == scenes
    assert scenes.spread(1).classes == scenes.classes


def test_a_picture_of_another_size_than_its_annotation(tmp_path: Path) -> None:
    scenes = find_scenes(pack(tmp_path / "val-0.tar", {**pairs(), "a.jpg": encoded((20, 24), form="JPEG")}))
    with pytest.raises(LeanconvError, match=r"a\.jpg' is 20 x 24 pixels, but its annotation is for 30 x 24"):
        SceneSet(scenes)[0]
