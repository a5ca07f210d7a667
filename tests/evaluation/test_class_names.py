"""Where labels come from: shards, ImageNet's own layout, and lists."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import torch

from leanconv import LeanconvError
from leanconv.evaluation.class_names import class_indices, labelled
from leanconv.images import Pictures, find_pictures, held_out
from tests.support.pictures import SMALL, encoded, pack, write_picture

# Shards.


@pytest.mark.parametrize(
    ("pattern", "labels"),
    [
        ("", "001122"),
        ("val-*.tar", "001122"),
        ("val-{000..001}.tar", "0011"),
        ("val-00{0,2}.tar", "0022"),
        ("val-00{1,2}*.tar", "1122"),
        ("val-002.tar", "22"),
    ],
)
def test_shards_give_the_class_beside_the_picture(pattern: str, labels: str, shards: Path) -> None:
    found = find_pictures(str(shards / pattern) if pattern else shards)
    assert [picture.label for picture in found] == list(labels)
    assert len({picture.name for picture in found}) == len(found)
    assert class_indices(found, None) == {label: int(label) for label in labels}


def test_shards_are_read_in_place_by_workers(shards: Path) -> None:
    found = find_pictures(shards)
    assert found[-1].read() == encoded(seed=2, form="JPEG")
    here, there = Pictures(found, SMALL), Pictures(found, SMALL, workers=2, batch=2)
    assert torch.equal(torch.cat(list(here)), torch.cat(list(there)))


@pytest.mark.parametrize("key", ["label", "cls", "class"])
def test_json_labels_and_pictures_that_are_none(key: str, tmp_path: Path) -> None:
    members = {
        "a.png": encoded(),
        "a.mask.png": encoded(),
        "a.json": json.dumps({key: 7, "width": 3}).encode(),
        "b.png": encoded(),
        "b.json": json.dumps({key: 1}).encode(),
        "b.cls": b"8",
        "c.d.png": encoded(),
        "c.d.cls": b"9",
    }
    found = find_pictures(pack(tmp_path / "one.tar", members))
    assert {picture.name: picture.label for picture in found} == {"a.png": "7", "b.png": "8", "c.d.png": "9"}


def test_json_that_says_nothing_leaves_class_folders(tmp_path: Path) -> None:
    path = pack(tmp_path / "one.tar", {"cat/a.png": encoded(), "cat/a.json": b'{"width": 3}', "dog/b.png": encoded()})
    assert [picture.label for picture in find_pictures(path)] == ["cat", "dog"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("val-{000..003}.tar", r"val-003\.tar, not there or no \.tar file"),
        ("train-*.tar", "matches nothing"),
        ("val-{3..1}.tar", "matches nothing"),
        ("*", "notes.txt, not there or no"),
    ],
)
def test_patterns_that_name_no_shards(pattern: str, message: str, shards: Path) -> None:
    (shards / "notes.txt").write_text("x")
    with pytest.raises(LeanconvError, match=message):
        find_pictures(str(shards / pattern))


@pytest.mark.parametrize("members", [{"a.cls": b" "}, {"a.cls": b"\xff"}, {"a.json": b"{"}])
def test_a_class_that_cannot_be_read_is_named(members: dict[str, bytes], tmp_path: Path) -> None:
    path = pack(tmp_path / "one.tar", {"a.png": encoded(), **members})
    with pytest.raises(LeanconvError, match=f"'{next(iter(members))}' in .* gives no class"):
        find_pictures(path)


# ImageNet's own layout.


def test_upper_case_and_the_folder_of_train_and_val(tmp_path: Path) -> None:
    for part in ("train", "val"):
        for wnid in ("n01440764", "n01443537"):
            (tmp_path / part / wnid).mkdir(parents=True)
            (tmp_path / part / wnid / f"{part}_1.JPEG").write_bytes(encoded(form="JPEG"))
    assert held_out(str(tmp_path)) == str(tmp_path / "val")
    assert held_out(str(tmp_path / "val")) == str(tmp_path / "val")
    found = find_pictures(held_out(str(tmp_path)))
    assert [picture.name for picture in found] == ["n01440764/val_1.JPEG", "n01443537/val_1.JPEG"]
    assert class_indices(found, None) == {"n01440764": 0, "n01443537": 1}
    with pytest.raises(LeanconvError, match="images of train and val together; give the place of val alone"):
        class_indices(find_pictures(tmp_path), None)
    with tarfile.open(tmp_path / "both.tar", "w") as archive:
        archive.add(tmp_path / "train", "imagenet/train")
        archive.add(tmp_path / "val", "imagenet/val")
    with pytest.raises(LeanconvError, match="train and val together"):
        class_indices(find_pictures(tmp_path / "both.tar"), None)


def test_classes_may_be_called_train_and_test(tmp_path: Path) -> None:
    for name in ("train", "test tube"):
        write_picture(tmp_path / "vehicles" / name / "1.png")
    assert class_indices(find_pictures(tmp_path), None) == {"test tube": 0, "train": 1}


def test_shards_of_train_and_val_are_not_mixed(shards: Path) -> None:
    pack(shards / "train" / "train-000.tar", {"x.png": encoded(), "x.cls": b"0"})
    with pytest.raises(LeanconvError, match="train and val together"):
        class_indices(find_pictures(shards), None)
    pack(shards / "train" / "val-000.tar", {"x.png": encoded(), "x.cls": b"0"})
    assert class_indices(find_pictures(str(shards / "train" / "val-*.tar")), None) == {"0": 0}


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    for number in (3, 1, 2):
        write_picture(tmp_path / "val" / f"ILSVRC2012_val_0000000{number}.JPEG")
    return tmp_path / "val"


@pytest.mark.parametrize(
    "text",
    [
        "4\n65\n970\n",
        "4\n\n65\n970",
        "ILSVRC2012_val_00000002.JPEG 65\nILSVRC2012_val_00000001.JPEG 4\nILSVRC2012_val_00000003.JPEG 970\n",
        "ImageId,PredictionString\nILSVRC2012_val_00000001,4 1 2 3 4\nILSVRC2012_val_00000002,65 1 2 3 4 65 5 6 7 8\n"
        "ILSVRC2012_val_00000003,970 1 2 3 4\n",
    ],
)
def test_a_flat_folder_with_a_list_of_labels(text: str, flat: Path, tmp_path: Path) -> None:
    (tmp_path / "val.txt").write_text(text)
    found = labelled(find_pictures(flat), tmp_path / "val.txt")
    assert [picture.label for picture in found] == ["4", "65", "970"]
    assert class_indices(found, None)["970"] == 970


def test_wnids_in_a_list_count_in_order_of_name(flat: Path, tmp_path: Path) -> None:
    (tmp_path / "val.txt").write_text("n03\nn01\nn02\n")
    found = class_indices(labelled(find_pictures(flat), tmp_path / "val.txt"), None)
    assert found == {"n01": 0, "n02": 1, "n03": 2}
    found.check(3)
    with pytest.raises(LeanconvError, match="3 class names but the network 1000 outputs"):
        found.check(1000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4\n65\n", "2 lines for 3 images"),
        ("ILSVRC2012_val_00000001 4\n", "no class for ILSVRC2012_val_00000002.JPEG"),
        (None, "cannot be read"),
    ],
)
def test_lists_that_do_not_fit(text: str | None, message: str, flat: Path, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "val.txt").write_text(text)
    with pytest.raises(LeanconvError, match=message):
        labelled(find_pictures(flat), tmp_path / "val.txt")


def test_one_line_for_two_images_is_refused(tmp_path: Path) -> None:
    write_picture(tmp_path / "p" / "a" / "0.png")
    write_picture(tmp_path / "p" / "b" / "0.png")
    (tmp_path / "val.txt").write_text("0.png 3\n")
    with pytest.raises(LeanconvError, match="one line for several images"):
        labelled(find_pictures(tmp_path / "p"), tmp_path / "val.txt")
    (tmp_path / "val.txt").write_text("a/0.png 3\nb/0.png 4\n")
    assert [picture.label for picture in labelled(find_pictures(tmp_path / "p"), tmp_path / "val.txt")] == ["3", "4"]
