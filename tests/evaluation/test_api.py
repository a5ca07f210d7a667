"""``leanconv.evaluate``: every form of data gives the same, networks stay as they were, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import leanconv
from leanconv import LeanconvError
from leanconv.images import Pictures, Preprocess, find_pictures
from leanconv.images.detection_data import SceneSet, find_scenes
from tests.support.networks import plain_network
from tests.support.pictures import SMALL, smooth_images, write_picture
from tests.support.scenes import COLOURS, Seer


class Labelled(Dataset[tuple[Tensor, int]]):
    """Images and classes one by one."""

    def __init__(self, images: Tensor, labels: Tensor):
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for label in range(2):
        for number in range(4):
            write_picture(tmp_path / "photos" / str(label) / f"{number}.png", 60 * number + 20 * label)
    return tmp_path / "photos"


def measured(data: Any, **options: Any) -> dict[str, Any]:
    found = leanconv.evaluate(plain_network(), data, plain_network(), progress=False, **options).to_json()
    return {name: value for name, value in found.items() if name != "data"}


def test_a_path_a_dataset_a_loader_batches_and_tensors_give_the_same(photos: Path) -> None:
    pictures = find_pictures(photos)
    images, labels = torch.cat(list(Pictures(pictures, SMALL))), torch.tensor([int(p.label or "") for p in pictures])
    expected = measured(photos, preprocess=SMALL)
    assert (expected["images"], expected["agreement"]) == (8, 1.0)
    data = Labelled(images, labels)
    batches = list(zip(images.split(3), labels.split(3), strict=True))
    for given in (data, DataLoader(data, 3), batches, iter(batches), (images, labels)):
        assert measured(given) == expected
    with torch.no_grad():
        right = (plain_network().eval()(images).argmax(1) == labels).double().mean().item()
    found = leanconv.evaluate(plain_network(), (images, labels), progress=False)
    assert found.top1 == right
    assert str(found) == f"the model: top-1 {100 * right:.2f} %, top-5 {100 * found.top5:.2f} % of 8 images"
    assert json.loads(json.dumps(found.to_json()))["unreadable"] == []


def test_networks_stay_as_they_were() -> None:
    model = plain_network().train()
    model[1].eval()
    before = [module.training for module in model.modules()]
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    leanconv.evaluate(model, (smooth_images(4), torch.zeros(4).long()), progress=False)
    assert [module.training for module in model.modules()] == before
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())


def test_results_of_accelerate_remember_how_their_images_are_read(photos: Path) -> None:
    result = leanconv.accelerate(plain_network(), smooth_images(), 2.0, samples=200, progress=False)
    small = leanconv.Accelerated(**{**vars(result), "preprocess": SMALL.to_json()})
    large = leanconv.Accelerated(**{**vars(result), "preprocess": Preprocess(size=20).to_json()})
    alone = leanconv.evaluate(small, photos, progress=False)
    again = leanconv.evaluate(result.model, photos, progress=False, preprocess=SMALL)
    assert (alone.top1, alone.top5) == (again.top1, again.top5)
    with pytest.raises(LeanconvError, match="made for different preprocessing; give the one to use as preprocess"):
        leanconv.evaluate(small, photos, large)


def test_detectors_on_a_dataset_and_a_loader(scenes: Path) -> None:
    data = SceneSet(find_scenes(scenes / "data"))
    expected = leanconv.evaluate(Seer(), scenes / "data", Seer(blind=3), progress=False)
    assert expected.change is not None
    assert expected.change.increase == pytest.approx(1 / 3)
    loader = DataLoader(data, 5, collate_fn=lambda pairs: tuple(zip(*pairs, strict=True)))
    for given in (data, loader):
        found = leanconv.evaluate(Seer(), given, Seer(blind=3), categories=["", *COLOURS], progress=False)
        assert (found.change, found.classes, found.about["images"]) == (expected.change, tuple(COLOURS), 12)
        assert str(found) == str(expected)
    with pytest.raises(LeanconvError, match="not known which classes there are; give categories"):
        leanconv.evaluate(Seer(), data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"views": 5}, "views 5 is not known; use 1 or 10"),
        ({"metric": "voc"}, "metric is for detectors, which the model is none of"),
        ({"limit": 3}, "limit goes with a path of images, and data is a tuple"),
        ({"data": [torch.rand(2, 3, 16, 16)]}, "gave a Tensor where a pair of images and class indices"),
        ({"data": (torch.rand(2, 3, 16, 16), torch.tensor([3, 11]))}, "class indices must be 0 to 9; found 11: 11"),
        ({"other": Seer()}, "original is a classifier and other is a detector; give two of a kind"),
        ({"other": nn.Flatten()}, "original has 10 outputs and other has 768 outputs"),
        ({"data": "nowhere"}, "'nowhere' does not exist"),
        ({"data": "nowhere", "views": 10, "preprocess": SMALL.__call__}, "'nowhere' does not exist"),
        ({"device": "nonsense"}, "device='nonsense' cannot be used here"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    arguments = {"data": (smooth_images(4), torch.zeros(4).long()), "progress": False, **options}
    with pytest.raises(LeanconvError, match=message):
        leanconv.evaluate(plain_network(), **arguments)


def test_ten_views_need_sizes(photos: Path) -> None:
    with pytest.raises(LeanconvError, match="ten views need a leanconv"):
        leanconv.evaluate(plain_network(), photos, views=10, preprocess=SMALL.__call__, progress=False)
    found = leanconv.evaluate(plain_network(), photos, views=10, preprocess=SMALL, progress=False)
    assert found.about["views"] == 10
