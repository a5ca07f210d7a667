"""Detectors on VGG-16's convolutions: Fast R-CNN, which is given proposals, and Faster R-CNN, which makes them."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.transform import GeneralizedRCNNTransform, resize_boxes
from torchvision.ops import MultiScaleRoIAlign, clip_boxes_to_image

from leanconv.errors import LeanconvError, unknown_name, whole

# What VGG-16's weights expect of pictures in [0, 1].
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Both papers train conv3_1 and up.
FROZEN = 2
# Sides of the anchors at stride 16, for pictures of about 320 pixels.
ANCHORS = (32, 64, 128, 256)
POOLINGS = (nn.MaxPool2d, nn.AvgPool2d)
GRID = 7  # cells a side that a region is pooled to
NMS = 0.3  # overlap up to which two boxes of a class are kept, as both papers have it on VOC

Target = dict[str, Tensor]


class FastRCNN(nn.Module):
    """A detector that is told where to look.

    ``forward(images, proposals, targets=None)``: images a list of 3 x height x width in [0, 1]; proposals for each an
    n x 4 tensor (xmin, ymin, xmax, ymax) in its pixels; targets, in training, dictionaries with ``boxes`` and
    ``labels`` (from 1). Training returns the losses by name, evaluation a dictionary an image: boxes, labels, scores.
    """

    def __init__(self, backbone: nn.Module, roi_heads: nn.Module, transform: nn.Module) -> None:
        super().__init__()
        self.transform: Any = transform
        self.backbone = backbone
        self.roi_heads = roi_heads

    def forward(
        self, images: Sequence[Tensor], proposals: Sequence[Tensor], targets: Sequence[Target] | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        self._check(images, proposals, targets)
        given = [(int(image.shape[-2]), int(image.shape[-1])) for image in images]
        batch, scaled = self.transform(list(images), None if targets is None else list(targets))
        regions = [
            clip_boxes_to_image(resize_boxes(boxes.to(batch.tensors), before, after), after)
            for boxes, before, after in zip(proposals, given, batch.image_sizes, strict=True)
        ]
        features = OrderedDict([("0", self.backbone(batch.tensors))])
        found, losses = self.roi_heads(features, regions, batch.image_sizes, scaled)
        if self.training:
            answer: dict[str, Tensor] = losses
            return answer
        boxes: list[dict[str, Tensor]] = self.transform.postprocess(found, batch.image_sizes, given)
        return boxes

    def _check(self, images: Sequence[Tensor], proposals: Sequence[Tensor], targets: Sequence[Target] | None) -> None:
        if self.training and targets is None:
            raise LeanconvError("a detector in training mode needs targets; give them, or call eval() first.")
        for what, given in (("proposals", proposals), ("targets", targets)):
            if given is not None and len(given) != len(images):
                raise LeanconvError(f"{len(given)} {what} for {len(images)} images; give one for each.")
        for number, boxes in enumerate(proposals):
            if boxes.dim() != 2 or boxes.shape[1] != 4:
                raise LeanconvError(
                    f"the proposals of image {number} have the shape {tuple(boxes.shape)}; give n x 4: xmin, ymin, "
                    "xmax, ymax in pixels."
                )


class Head(nn.Module):
    """fc6 and fc7 of VGG-16 on a pooled region: n x c x 7 x 7 -> n x width."""

    def __init__(self, inputs: int, width: int, dropout: float) -> None:
        super().__init__()
        self.fc6 = nn.Linear(inputs, width)
        self.fc7 = nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.fc6, self.fc7):
            x = F.dropout(F.relu(layer(x.flatten(1))), self.dropout, self.training)
        return x


def fast_rcnn_vgg16(
    num_classes: int,
    *,
    features: nn.Module | None = None,
    frozen: int | None = None,
    width: int = 4096,
    dropout: float = 0.5,
    min_size: int = 600,
    max_size: int = 1000,
    box_score_thresh: float = 0.05,
    box_nms_thresh: float = NMS,
    box_detections_per_img: int = 100,
    box_batch_size_per_image: int = 64,
) -> FastRCNN:
    """Fast R-CNN (Girshick, 2015) with VGG-16. ``num_classes`` counts the background.

    Args:
        features: VGG-16's ``features``, plain or accelerated, or any nn.Sequential; copied, without a max pooling at
            its end. Default: VGG-16's with random weights.
        frozen: blocks, each up to and with a pooling, that are not trained. Default: 2, as in the paper, of features
            that were given; 0 of random ones.
        width: of fc6 and fc7.
        dropout: of the same.
        min_size: pictures are scaled to this shorter side,
        max_size: and to this longer one at most.

    What begins with ``box_`` is as in torchvision's FasterRCNN, with the paper's numbers.

    Regions are pooled to 7 x 7 with bilinear sampling (RoIAlign) and not, as in 2015, with the maximum over cells
    rounded to the grid of 16 pixels: rounding costs most where pictures are small.
    """
    _check_head(num_classes, width, dropout)
    backbone = _backbone(features, frozen)
    heads = RoIHeads(
        **_box_parts(backbone, num_classes, width, dropout),
        fg_iou_thresh=0.5,
        bg_iou_thresh=0.5,
        batch_size_per_image=whole("box_batch_size_per_image", box_batch_size_per_image, 1),
        positive_fraction=0.25,
        bbox_reg_weights=None,
        score_thresh=box_score_thresh,
        nms_thresh=box_nms_thresh,
        detections_per_img=box_detections_per_img,
    )
    return FastRCNN(backbone, heads, GeneralizedRCNNTransform(min_size, max_size, list(MEAN), list(STD)))


def faster_rcnn_vgg16(
    num_classes: int,
    *,
    features: nn.Module | None = None,
    frozen: int | None = None,
    width: int = 4096,
    dropout: float = 0.5,
    min_size: int = 320,
    max_size: int = 320,
    **kwargs: Any,
) -> nn.Module:
    """Faster R-CNN (Ren et al., 2015) with VGG-16: torchvision's FasterRCNN, whose other arguments are ``kwargs``.

    ``num_classes`` counts the background; the others as for ``fast_rcnn_vgg16``. The anchors, 32 to 256 pixels at
    stride 16, are for pictures of about 320; give ``rpn_anchor_generator`` for larger ones.
    """
    known = {*inspect.signature(FasterRCNN).parameters, *inspect.signature(GeneralizedRCNNTransform).parameters}
    for name in kwargs:
        if name not in known - {"self", "backbone", "num_classes", "kwargs"}:
            raise unknown_name(name, sorted(known), what="argument", where="faster_rcnn_vgg16")
    _check_head(num_classes, width, dropout)
    backbone = _backbone(features, frozen)
    settings = {
        "rpn_anchor_generator": AnchorGenerator((ANCHORS,), ((0.5, 1.0, 2.0),)),
        "image_mean": list(MEAN),
        "image_std": list(STD),
        "box_nms_thresh": NMS,
        **_box_parts(backbone, num_classes, width, dropout),
    }
    detector: nn.Module = FasterRCNN(backbone, min_size=min_size, max_size=max_size, **(settings | kwargs))
    return detector


def freeze(features: nn.Module, blocks: int) -> None:
    """Train all of ``features`` but its first ``blocks`` blocks; a block ends with a pooling."""
    ends = _poolings(features)
    if whole("frozen", blocks, 0) > len(ends):
        raise LeanconvError(
            f"frozen={blocks} blocks were asked for and features has {len(ends)} that end with a pooling; give at "
            f"most {len(ends)}."
        )
    last = ends[blocks - 1] if blocks else -1
    for number, module in enumerate(features.children()):
        module.requires_grad_(number > last)


def _poolings(features: nn.Module) -> list[int]:
    return [number for number, module in enumerate(features.children()) if isinstance(module, POOLINGS)]


def _check_head(num_classes: int, width: int, dropout: float) -> None:
    whole("num_classes", num_classes, 2)
    whole("width", width, 1)
    if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise LeanconvError(f"dropout={dropout!r} must be a number at least 0 and under 1.")


def _backbone(features: nn.Module | None, frozen: int | None) -> nn.Module:
    """A copy of ``features`` without a max pooling at its end, that knows its ``out_channels``."""
    if features is None:
        frozen = frozen or 0
        features = torchvision.models.vgg16(weights=None).features
    if not isinstance(features, nn.Sequential) or not len(features):
        raise LeanconvError(
            f"features is a {type(features).__name__} of {len(list(features.children()))} modules; give the features "
            "of a VGG network, an nn.Sequential."
        )
    layers = list(copy.deepcopy(features).named_children())
    if isinstance(layers[-1][1], nn.MaxPool2d):
        layers.pop()
    backbone = nn.Sequential(OrderedDict(layers))
    freeze(backbone, min(FROZEN, len(_poolings(backbone))) if frozen is None else frozen)
    backbone.out_channels = _channels(backbone)  # type: ignore[assignment]
    return backbone


def _channels(backbone: nn.Module) -> int:
    """Of the maps it gives, found by running it on a small picture."""
    like = next(backbone.parameters(), torch.zeros(()))
    was_training = backbone.training
    try:
        with torch.no_grad():
            maps = backbone.eval()(torch.zeros(1, 3, 64, 64, dtype=like.dtype, device=like.device))
    except Exception as error:
        raise LeanconvError(
            f"features cannot be run on a colour picture of 64 x 64 ({error}); give layers that take 1 x 3 x height "
            "x width."
        ) from error
    finally:
        backbone.train(was_training)
    if not isinstance(maps, Tensor) or maps.dim() != 4:
        raise LeanconvError("features must give maps, 1 x channels x height x width; give convolutions and poolings.")
    return int(maps.shape[1])


def _box_parts(backbone: nn.Module, num_classes: int, width: int, dropout: float) -> dict[str, nn.Module]:
    """Pooling, head and outputs for one region, new."""
    return {
        "box_roi_pool": MultiScaleRoIAlign(["0"], GRID, sampling_ratio=2),
        "box_head": Head(int(backbone.out_channels) * GRID**2, width, dropout),  # type: ignore[arg-type]
        "box_predictor": FastRCNNPredictor(width, num_classes),
    }
