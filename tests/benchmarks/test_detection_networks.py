"""The detectors: what they learn, what is frozen, and that they look where they are told."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import leanconv
from benchmarks.detection.networks import fast_rcnn_vgg16, faster_rcnn_vgg16
from leanconv import LeanconvError
from tests.support.networks import small_features
from tests.support.pictures import smooth_images

NAMES = ["fast", "faster"]
BOX = torch.tensor([[14.0, 10.0, 50.0, 42.0]])


def detector(name: str, features: nn.Module | None = None, **arguments) -> nn.Module:
    builder = {"fast": fast_rcnn_vgg16, "faster": faster_rcnn_vgg16}[name]
    features = small_features() if features is None else features
    torch.manual_seed(1)
    given = {"features": features, "width": 24, "dropout": 0.0, "min_size": 64, "max_size": 96}
    return builder(3, **(given | arguments))


def scene(box: Tensor = BOX) -> tuple[Tensor, dict[str, Tensor]]:
    """Noise, with a bright rectangle."""
    image = 0.2 * torch.rand(3, 64, 80, generator=torch.Generator().manual_seed(0))
    for left, top, right, bottom in box.int().tolist():
        image[:, top:bottom, left:right] += 0.7
    return image, {"boxes": box, "labels": torch.full((len(box),), 2)}


def proposals(count: int = 40) -> Tensor:
    corners = torch.rand(count, 2, 2, generator=torch.Generator().manual_seed(2)).sort(dim=1).values
    around = BOX + torch.randn(8, 4, generator=torch.Generator().manual_seed(3)) * 3
    return torch.cat(
        [(corners * torch.tensor([78.0, 62.0]) + torch.tensor([[0.0, 0.0], [2.0, 2.0]])).flatten(1), around]
    )


def run(network: nn.Module, name: str, image: Tensor, target: dict[str, Tensor] | None = None):
    targets = None if target is None else [target]
    return network([image], [proposals()], targets) if name == "fast" else network([image], targets)


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_to_find_a_rectangle(name: str) -> None:
    network = detector(name, frozen=0).train()
    image, target = scene()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(60):
        loss = sum(run(network, name, image, target).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(loss == loss and loss < float("inf") for loss in losses)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    with torch.no_grad():
        (found,) = run(network.eval(), name, image)
    assert int(found["labels"][0]) == 2
    overlap = torch.minimum(found["boxes"][0], BOX[0])[2:] - torch.maximum(found["boxes"][0], BOX[0])[:2]
    areas = [float((box[2:] - box[:2]).prod()) for box in (found["boxes"][0], BOX[0])]
    shared = float(overlap.clamp(min=0).prod())
    assert shared / (sum(areas) - shared) > 0.5


@pytest.mark.parametrize("name", NAMES)
def test_boxes_lie_inside_their_pictures(name: str) -> None:
    network = detector(name, box_score_thresh=0.0).eval()
    images = [torch.rand(3, 50, 120), torch.rand(3, 200, 90)]
    far = torch.tensor([[-30.0, -30.0, 400.0, 400.0], [10.0, 10.0, 40.0, 40.0]])
    with torch.no_grad():
        answers = network(images, [far, far]) if name == "fast" else network(images)
    for image, found in zip(images, answers, strict=True):
        height, width = image.shape[1:]
        boxes = found["boxes"]
        assert len(boxes) == len(found["labels"]) == len(found["scores"]) > 0
        assert float(boxes.min()) >= 0
        assert float(boxes[:, 2].max()) <= width + 1e-3
        assert float(boxes[:, 3].max()) <= height + 1e-3
        assert set(found["labels"].tolist()) <= {1, 2}


def test_it_looks_where_it_is_told() -> None:
    """With a head that moves no box and always answers 2, the proposals come back, in the picture's own pixels."""
    network = detector("fast", min_size=100, max_size=200, box_nms_thresh=0.9).eval()
    predictor = network.roi_heads.box_predictor
    with torch.no_grad():
        for parameter in predictor.parameters():
            parameter.zero_()
        predictor.cls_score.bias[2] = 5.0
    given = torch.tensor([[3.0, 4.0, 30.0, 44.0], [40.0, 8.0, 70.0, 60.0]])
    with torch.no_grad():
        (found,) = network([torch.rand(3, 64, 80)], [given])
        (nothing,) = network([torch.rand(3, 64, 80)], [given[:0]])
    order = found["boxes"][:, 0].argsort()
    assert found["labels"].tolist() == [2, 2]
    torch.testing.assert_close(found["boxes"][order], given)
    assert len(nothing["boxes"]) == 0


@pytest.mark.parametrize("name", NAMES)
def test_pictures_without_objects_train(name: str) -> None:
    network = detector(name).train()
    image, _ = scene()
    losses = run(network, name, image, {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)})
    sum(losses.values()).backward()
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("name", NAMES)
def test_accelerated_features_are_trained_on(name: str) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = small_features()
            self.head = nn.Linear(20, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.features(x).mean((2, 3)))

    result = leanconv.accelerate(Classifier().eval(), smooth_images(8, 48), 2.0, samples=500, progress=False)
    kept = copy.deepcopy(result.model.state_dict())
    network = detector(name, result.model.features, frozen=1).train()
    factors = dict(network.backbone.named_parameters())
    assert any(key.count(".") == 2 for key in factors)  # 3.vertical.weight: a layer in factors
    image, target = scene()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        sum(run(network, name, image, target).values()).backward()
        optimizer.step()
    frozen = {key for key in factors if key.startswith("0.")}
    assert frozen == {key for key, parameter in factors.items() if parameter.grad is None}
    assert all(bool(factors[key].grad.any()) for key in factors.keys() - frozen)
    assert all(torch.equal(value, kept[key]) for key, value in result.model.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_frozen_blocks_get_no_gradient(name: str) -> None:
    image, target = scene()
    for frozen, trained in [(0, {0, 3, 6, 9}), (2, {6, 9}), (None, {6, 9}), (3, {9})]:
        network = detector(name, frozen=frozen).train()
        sum(run(network, name, image, target).values()).backward()
        found = {int(key.split(".")[0]) for key, value in network.backbone.named_parameters() if value.grad is not None}
        assert found == trained


@pytest.mark.parametrize("name", NAMES)
def test_vgg16_loses_its_last_pooling_and_keeps_its_numbers(name: str) -> None:
    builder = {"fast": fast_rcnn_vgg16, "faster": faster_rcnn_vgg16}[name]
    network = builder(21, width=4)
    assert [key for key, _ in network.backbone.named_children()] == [str(number) for number in range(30)]
    assert network.backbone.out_channels == 512
    assert network.roi_heads.box_head.fc6.in_features == 512 * 49
    assert network.roi_heads.box_predictor.cls_score.out_features == 21
    assert all(parameter.requires_grad for parameter in network.parameters())  # random layers are worth no freezing
    assert (network.transform.image_mean, network.transform.image_std) == ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"frozen": 7}, "features has 3 that end with a pooling; give at most 3"),
        ({"features": nn.Conv2d(3, 4, 1)}, "features is a Conv2d of 0 modules; give the features of a VGG network"),
        ({"features": nn.Sequential(nn.Linear(3, 4))}, "features cannot be run on a colour picture of 64 x 64"),
        ({"features": nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten())}, "features must give maps"),
        ({"width": 0}, "width=0 must be a whole number"),
        ({"dropout": 1.0}, "dropout=1.0 must be a number at least 0 and under 1"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_bad_arguments_are_named(name: str, arguments: dict, sentence: str) -> None:
    with pytest.raises(LeanconvError, match=sentence):
        detector(name, **arguments)


def test_more_bad_arguments_are_named() -> None:
    with pytest.raises(LeanconvError, match="num_classes=1 must be a whole number from 2"):
        faster_rcnn_vgg16(1)
    with pytest.raises(LeanconvError, match="did you mean box_score_thresh"):
        detector("faster", box_score_tresh=0.1)
    network, (image, target) = detector("fast"), scene()
    with pytest.raises(LeanconvError, match="training mode needs targets"):
        network.train()([image], [proposals()])
    with pytest.raises(LeanconvError, match="2 proposals for 1 images"):
        network.eval()([image], [proposals(), proposals()], [target])
    with pytest.raises(LeanconvError, match=r"proposals of image 0 have the shape \(4,\); give n x 4"):
        network.eval()([image], [torch.zeros(4)])
