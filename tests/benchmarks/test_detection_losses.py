"""A batch's losses in one go are torchvision's, picture by picture."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor
from torchvision.models.detection.image_list import ImageList

from benchmarks.detection import losses as detection_losses
from benchmarks.detection.networks import faster_rcnn_vgg16
from tests.support.networks import small_features


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three pictures: one object, none, three that overlap."""
    pictures = torch.randint(0, 256, (3, 3, 96, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([[96, 80], [70, 96], [96, 96]])
    boxes, labels = torch.zeros(3, 4, 4), torch.zeros(3, 4, dtype=torch.int64)
    boxes[0, 0], labels[0, 0] = torch.tensor([10.0, 10, 60, 70]), 3
    boxes[2, :3] = torch.tensor([[1.0, 5, 90, 70], [30, 20, 80, 90], [30, 20, 40, 33]])
    labels[2, :3] = torch.tensor([2, 3, 4])
    return pictures, sizes, boxes, labels


def test_losses_of_a_batch_are_those_of_torchvision() -> None:
    """Where everything is sampled, chance has no part in them."""
    everything = {"box_batch_size_per_image": 10**6, "rpn_batch_size_per_image": 10**6}
    network = faster_rcnn_vgg16(
        5, features=small_features(), width=16, dropout=0.0, rpn_post_nms_top_n_train=40, **everything
    ).train()
    pictures, sizes, boxes, labels = batch()
    found = detection_losses.BatchLosses(network)(pictures, sizes, boxes, labels)
    sum(found.values()).backward()
    ours = {name: value.grad.clone() for name, value in network.named_parameters() if value.grad is not None}
    network.zero_grad()

    x = detection_losses.normalised(pictures)
    features = OrderedDict([("0", network.backbone(x))])
    real = labels > 0
    targets = [{"boxes": b[r], "labels": c[r]} for b, c, r in zip(boxes, labels, real, strict=True)]
    proposals, losses = network.rpn(ImageList(x, [tuple(size) for size in sizes.tolist()]), features, targets)
    _, more = network.roi_heads(features, proposals, [(96, 96)] * 3, targets)
    sum([*losses.values(), *more.values()]).backward()
    assert found.keys() == losses.keys() | more.keys()
    for name, value in {**losses, **more}.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    theirs = {name: value.grad for name, value in network.named_parameters() if value.grad is not None}
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-5)


def test_pictures_without_objects_have_finite_losses() -> None:
    network = faster_rcnn_vgg16(5, features=small_features(), width=16).train()
    pictures, sizes, boxes, labels = batch()
    found = detection_losses.BatchLosses(network)(pictures[1:2], sizes[1:2], boxes[1:2], labels[1:2])
    sum(found.values()).backward()
    assert all(value.isfinite() for value in found.values())
    assert all(value.grad.isfinite().all() for value in network.parameters() if value.grad is not None)


def test_what_is_drawn_is_allowed_and_balanced() -> None:
    torch.manual_seed(0)
    positive = torch.zeros(3, 50, dtype=torch.bool)
    positive[0, :20] = True
    positive[1, :2] = True
    negative = ~positive
    negative[:, -10:] = False
    index, used = detection_losses.drawn(positive, negative, 16, 0.25)
    assert used.all()
    assert positive.gather(1, index).sum(1).tolist() == [4, 2, 0]
    assert negative.gather(1, index).sum(1).tolist() == [12, 14, 16]
    assert all(len(set(row.tolist())) == 16 for row in index)
    index, used = detection_losses.drawn(positive[:, :20], negative[:, :20] & False, 16, 0.25)
    assert used.sum(1).tolist() == [4, 2, 0]
