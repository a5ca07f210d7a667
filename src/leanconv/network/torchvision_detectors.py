"""torchvision's detectors as functions of tensors: a batch of images and boxes in, feature maps and head outputs out.

A detector uses the boxes of its first stage, so the inputs of its second stage depend on values, and two detectors that
differ a little use different boxes. Here the boxes are an input, the same for both. Layers that run on every map of a
pyramid run on all maps before the next layer, so all inputs of a layer exist when it first runs. Resizing, normalising
and the choice of boxes are not part of it.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.network.layers.modules import Factored

# Boxes of an image for the second stage: the best proposals; and detected ones, for masks and keypoints.
PROPOSALS, FOUND = 64, 8


def kind_of(model: nn.Module) -> str | None:
    """One of "two-stage", "retinanet", "fcos" and "ssd"; None for what is none of torchvision's detectors, or has a
    forward or a head of its own that does something else."""
    if "torchvision.models.detection" not in sys.modules:
        return None  # no detector exists yet
    from torchvision.models.detection import fcos, retinanet, roi_heads, rpn, ssd
    from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN

    own: Any = model
    if _works_as(model, GeneralizedRCNN):
        parts = ((own.rpn, rpn.RegionProposalNetwork), (own.rpn.head, rpn.RPNHead), (own.roi_heads, roi_heads.RoIHeads))
        return "two-stage" if all(_works_as(part, kind) for part, kind in parts) else None
    for kind, base, classification, regression in (
        ("retinanet", retinanet.RetinaNet, retinanet.RetinaNetClassificationHead, retinanet.RetinaNetRegressionHead),
        ("fcos", fcos.FCOS, fcos.FCOSClassificationHead, fcos.FCOSRegressionHead),
    ):
        if _works_as(model, base):
            first, second = (getattr(own.head, f"{end}_head", None) for end in ("classification", "regression"))
            return kind if _works_as(first, classification) and _works_as(second, regression) else None
    return "ssd" if _works_as(model, ssd.SSD) else None


def _works_as(module: Any, kind: type[nn.Module]) -> bool:
    """Whether it is one, with the forward of the class."""
    return isinstance(module, kind) and type(module).forward is kind.forward and "forward" not in vars(module)


def seen_as_tensors(model: nn.Module) -> None:
    """From now on ``model`` (a copy of a detector) takes and gives tensors, as described above."""
    forwards = {"two-stage": _two_stage, "retinanet": _pyramid, "fcos": _pyramid, "ssd": _ssd}
    kind = kind_of(model)
    assert kind is not None
    vars(model)["forward"] = MethodType(forwards[kind], model)


def seen_as_detector(model: nn.Module) -> None:
    """Undoes ``seen_as_tensors``."""
    vars(model).pop("forward", None)


@torch.no_grad()
def tensors_of(model: Any, images: Sequence[Tensor]) -> dict[str, Tensor]:
    """The inputs of a detector as a function of tensors, from ``images`` and the detector itself (``model``, in eval
    mode): its input batch (B x 3 x H x W), and with two stages the boxes it uses (B x n x 4)."""
    batch, _ = model.transform(list(images))
    inputs, sizes = {"images": batch.tensors}, batch.image_sizes
    if kind_of(model) != "two-stage":
        return inputs
    features = _named(model.backbone(batch.tensors))
    proposals, _ = model.rpn(batch, features)
    boxes = [_exactly(own, PROPOSALS, size) for own, size in zip(proposals, sizes, strict=True)]
    inputs["boxes"] = torch.stack(boxes)
    if model.roi_heads.has_mask() or model.roi_heads.has_keypoint():
        detections, _ = model.roi_heads(features, proposals, sizes)
        detected = [torch.cat([each["boxes"], own]) for each, own in zip(detections, proposals, strict=True)]
        boxes = [_exactly(own, FOUND, size) for own, size in zip(detected, sizes, strict=True)]
        inputs["found"] = torch.stack(boxes)
    return inputs


def _exactly(boxes: Tensor, count: int, size: tuple[int, int]) -> Tensor:
    """The first ``count`` boxes, repeated where there are fewer; the image and its quarters where there are none."""
    if not len(boxes):
        h, w = size
        quarters = [(x, y, x + w / 2, y + h / 2) for y in (0, h / 2) for x in (0, w / 2)]
        boxes = boxes.new_tensor([(0, 0, w, h), *quarters])
    return boxes[torch.arange(count, device=boxes.device) % len(boxes)]


def _named(features: Any) -> dict[str, Tensor]:
    return OrderedDict([("0", features)]) if isinstance(features, Tensor) else features


def _two_stage(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    features = _named(model.backbone(inputs["images"]))
    head, heads = model.rpn.head, model.roi_heads
    maps = list(features.values())
    outputs = list(maps)
    hidden = _over(head.conv, maps)
    outputs += _over(head.cls_logits, hidden) + _over(head.bbox_pred, hidden)

    def pooled(pool: Any, boxes: Tensor) -> Tensor:
        return _pooled(pool, features, boxes, inputs["images"])

    outputs += heads.box_predictor(heads.box_head(pooled(heads.box_roi_pool, inputs["boxes"])))
    if heads.has_mask():
        outputs.append(heads.mask_predictor(heads.mask_head(pooled(heads.mask_roi_pool, inputs["found"]))))
    if heads.has_keypoint():
        outputs.append(heads.keypoint_predictor(heads.keypoint_head(pooled(heads.keypoint_roi_pool, inputs["found"]))))
    return outputs


def _pyramid(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    maps = list(_named(model.backbone(inputs["images"])).values())
    classification, regression = model.head.classification_head, model.head.regression_head
    outputs = [*maps, *_over(classification.cls_logits, _over(classification.conv, maps))]
    hidden = _over(regression.conv, maps)
    boxes = _over(regression.bbox_reg, hidden)
    if hasattr(regression, "bbox_ctrness"):  # FCOS: distances, never negative
        return [*outputs, *(x.relu() for x in boxes), *_over(regression.bbox_ctrness, hidden)]
    return [*outputs, *boxes]


def _ssd(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    maps = list(_named(model.backbone(inputs["images"])).values())
    return [*maps, *model.head(maps).values()]


def _over(module: nn.Module, maps: list[Tensor]) -> list[Tensor]:
    """Every step of ``module`` over all maps before the next."""
    for step in _steps(module):
        maps = [step(x) for x in maps]
    return maps


def _steps(module: nn.Module) -> Iterator[nn.Module]:
    whole = isinstance(module, Factored)  # replaces one layer
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not whole:
        for child in module:
            yield from _steps(child)
    else:
        yield module


def _pooled(pool: Any, features: dict[str, Tensor], boxes: Tensor, images: Tensor) -> Tensor:
    """What ``pool`` cuts out of the maps for ``boxes`` (B x n x 4): (B n) x c x k x k.

    torchvision's pooling over several maps reads values of tensors to choose a map for each box; here every box is cut
    out of every map, and the right result is selected.
    """
    from torchvision.ops import MultiScaleRoIAlign, roi_align

    h, w = images.shape[-2:]
    if not isinstance(pool, MultiScaleRoIAlign):
        pooled: Tensor = pool(features, list(boxes), [(h, w)] * len(boxes))
        return pooled
    maps = [x for name, x in features.items() if name in pool.featmap_names]
    exponents = [round(math.log2(x.shape[-2] / h)) for x in maps]  # scales are powers of two
    image = torch.arange(len(boxes), device=boxes.device, dtype=boxes.dtype)[:, None, None]
    rois = torch.cat([image.expand(-1, boxes.shape[1], 1), boxes], 2).flatten(0, 1)  # (B n) x 5
    size, ratio = pool.output_size, pool.sampling_ratio
    cut = [roi_align(x, rois, size, 2.0**e, ratio) for x, e in zip(maps, exponents, strict=True)]
    sides = (rois[:, 3:] - rois[:, 1:3]).prod(1).sqrt()
    level = torch.floor(pool.canonical_level + torch.log2(sides / pool.canonical_scale) + 1e-6)
    level = level.clamp(-exponents[0], -exponents[-1])
    result: Tensor = cut[0]
    for exponent, part in zip(exponents[1:], cut[1:], strict=True):
        result = torch.where((level == -exponent)[:, None, None, None], part, result)
    return result
