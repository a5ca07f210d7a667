"""Hugging Face datasets: saved ones and those with a name, their columns and splits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from leanconv import LeanconvError
from leanconv.evaluation.class_names import class_indices
from leanconv.images import Pictures, find_pictures, held_out
from tests.support.pictures import SMALL, encoded, write_picture


def saved_dataset(folder: Path, images: str = "image", labels: str = "label", *, named: bool = True) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    kinds = {
        images: datasets.Image(),
        labels: datasets.ClassLabel(names=["cat", "dog"]),
        "note": datasets.Value("string"),
    }
    if not named:
        kinds |= {images: datasets.Value("binary"), labels: datasets.Value("int64")}
    pictures = [encoded(seed=seed) for seed in range(4)]
    columns = {
        images: [{"bytes": data, "path": None} for data in pictures] if named else pictures,
        labels: [1, 0, 1, -1],
        "note": list("abcd"),
    }
    datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)).save_to_disk(str(folder))
    return folder


@pytest.mark.parametrize(
    ("images", "labels", "named"), [("image", "label", True), ("photo", "kind", True), ("img", "fine_label", False)]
)
def test_saved_datasets(images: str, labels: str, named: bool, tmp_path: Path) -> None:
    found = find_pictures(saved_dataset(tmp_path / "set", images, labels, named=named))
    assert [picture.label for picture in found] == ["1", "0", "1", None]
    assert [picture.read() for picture in found] == [encoded(seed=seed) for seed in range(4)]
    with pytest.raises(LeanconvError, match="1 images lie in no class folder"):
        class_indices(found, None)


def test_workers_read_datasets(tmp_path: Path) -> None:
    found = find_pictures(saved_dataset(tmp_path / "set"))
    here, there = Pictures(found, SMALL), Pictures(found, SMALL, workers=2, batch=1)
    assert torch.equal(torch.cat(list(here)), torch.cat(list(there)))


def test_splits_must_be_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.load_from_disk(str(saved_dataset(tmp_path / "one")))
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(LeanconvError, match=r"has the splits train, test; name one, for example .*both/test"):
        find_pictures(tmp_path / "both")
    assert len(find_pictures(held_out(str(tmp_path / "both")))) == 4
    datasets.DatasetDict({"test": one}).save_to_disk(str(tmp_path / "single"))
    assert len(find_pictures(tmp_path / "single")) == 4


def test_load_dataset_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for part in ("train", "test"):
        for label in ("cat", "dog"):
            write_picture(tmp_path / "animals" / part / label / "1.png", 10)
    with pytest.raises(LeanconvError, match=r"splits .*; name one, for example hf:"):
        find_pictures(f"hf:{tmp_path}/animals")
    found = find_pictures(f"hf:{tmp_path}/animals:test")
    assert [picture.label for picture in found] == ["0", "1"]
    assert found[0].read() == (tmp_path / "animals" / "test" / "cat" / "1.png").read_bytes()
    with pytest.raises(LeanconvError, match="could not be loaded"):
        find_pictures(f"hf:{tmp_path}/animals:nonsense")


def test_columns_that_are_not_clear(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a"], "label": [1]}).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(LeanconvError, match="columns text, label, of which it is not clear which holds the images"):
        find_pictures(tmp_path / "set")


def test_without_the_package_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(LeanconvError, match="needs: pip install datasets"):
        find_pictures("hf:uoft-cs/cifar10:test")
