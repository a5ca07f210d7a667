"""Torchvision's detectors in small."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import FCOS, FasterRCNN, KeypointRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.ssd import SSD
from torchvision.ops import MultiScaleRoIAlign

CHANNELS = 32  # FCOS normalises in 32 groups


class Backbone(nn.Module):
    """Three maps, as a feature pyramid has them."""

    out_channels = CHANNELS

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, 2, 1)
        self.down = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, 2, 1) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x).relu()
        maps = OrderedDict()
        for number, layer in enumerate(self.down):
            x = layer(x).relu()
            maps[str(number)] = x
        return maps


def anchors() -> AnchorGenerator:
    return AnchorGenerator(((8,), (16,), (32,)), ((0.5, 1.0, 2.0),) * 3)


def pool(size: int) -> MultiScaleRoIAlign:
    return MultiScaleRoIAlign(["0", "1", "2"], size, 2)


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"min_size": 64, "max_size": 96}
    if kind == "retinanet":
        return RetinaNet(Backbone(), 3, anchor_generator=anchors(), **sizes).eval()
    if kind == "ssd":
        backbone: Any = Backbone()
        backbone.out_channels = [CHANNELS] * 3  # SSD's may differ from map to map
        return SSD(backbone, DefaultBoxGenerator([[2], [2], [2]]), (64, 64), 3).eval()
    if kind == "fcos":
        one = AnchorGenerator(((8,), (16,), (32,)), ((1.0,),) * 3)
        return FCOS(Backbone(), 3, anchor_generator=one, **sizes).eval()
    common: dict[str, Any] = {
        "rpn_anchor_generator": anchors(),
        "box_roi_pool": pool(3),
        "box_head": TwoMLPHead(CHANNELS * 9, 24),
        "box_predictor": FastRCNNPredictor(24, 3),
        "num_classes": None,
        **sizes,
    }
    if kind == "faster":
        return FasterRCNN(Backbone(), **common).eval()
    if kind == "keypoint":
        points: dict[str, Any] = {
            "keypoint_roi_pool": pool(6),
            "keypoint_head": KeypointRCNNHeads(CHANNELS, (CHANNELS,)),
            "keypoint_predictor": KeypointRCNNPredictor(CHANNELS, 5),
        }
        return KeypointRCNN(Backbone(), **common, **points).eval()
    masks: dict[str, Any] = {
        "mask_roi_pool": pool(6),
        "mask_head": MaskRCNNHeads(CHANNELS, (CHANNELS,), 1),
        "mask_predictor": MaskRCNNPredictor(CHANNELS, CHANNELS, 3),
    }
    return MaskRCNN(Backbone(), **common, **masks).eval()
