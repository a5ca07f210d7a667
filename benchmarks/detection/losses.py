"""The losses of a Faster R-CNN for a batch of canvases, without a loop over pictures.

torchvision matches and samples picture by picture, some 200 small operations each, which on a fast GPU take longer
than VGG-16 does. Canvases of one size have the same anchors, so all of it can be done for a batch at once; only the
suppression of overlapping proposals is left to a loop. The losses are torchvision's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import concat_box_prediction_layers
from torchvision.ops import nms

from benchmarks.detection.networks import MEAN, STD

SMALLEST = 1e-3  # pixels, of a proposal's sides
BETA = 1 / 9  # where the loss of a box turns from squares to absolute values


class BatchLosses(nn.Module):
    """``forward(pictures, sizes, boxes, labels)``: b x 3 x s x s bytes with the picture in the upper left corner;
    b x 2 heights and widths; b x m x 4 boxes and b x m labels, 0 where a picture has fewer than m objects.

    ``half``: the precision of VGG-16 and of the head; boxes and proposals are always single.
    """

    def __init__(self, detector: Any, half: torch.dtype | None = None) -> None:
        super().__init__()
        self.detector = detector
        self.half = half

    def forward(self, pictures: Tensor, sizes: Tensor, boxes: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = normalised(pictures)
        with torch.autocast(x.device.type, self.half or torch.bfloat16, enabled=self.half is not None):
            features = self.detector.backbone(x)
        with torch.autocast(x.device.type, enabled=False):
            features = features.float()
            proposals, losses = self._proposals(x, features, sizes, boxes, labels > 0)
        return losses | self._regions(features, proposals, boxes, labels, x.shape[-1])

    def _proposals(
        self, x: Tensor, features: Tensor, sizes: Tensor, boxes: Tensor, real: Tensor
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        rpn = self.detector.rpn
        count, side = len(x), x.shape[-1]
        (anchors,) = rpn.anchor_generator(ImageList(x[:1], [(side, side)]), [features[:1]])
        scores, steps = concat_box_prediction_layers(*rpn.head([features]))
        scores, steps = scores.view(count, -1), steps.view(count, -1, 4)
        everywhere = anchors.expand(count, -1, -1)
        with torch.no_grad():
            best = scores.topk(min(rpn.pre_nms_top_n(), scores.shape[1]))
            chosen = at(everywhere, best.indices), at(steps, best.indices)
            found = rpn.box_coder.decode_single(chosen[1].reshape(-1, 4), chosen[0].reshape(-1, 4))
            found = clipped(found.view(count, -1, 4), sizes)
            proposals = [
                candidates[nms(candidates, values, rpn.nms_thresh)[: rpn.post_nms_top_n()]]
                for candidates, values in zip(found, best.values, strict=True)
            ]
            overlap, which, goal = matched(everywhere, boxes, real, rpn.proposal_matcher)
            # An object's best anchors are its own, however poor.
            top = overlap.amax(2, keepdim=True)
            goal[((overlap == top) & (top > 0)).any(1)] = 1
            sampler = rpn.fg_bg_sampler
            index, used = drawn(goal == 1, goal == 0, sampler.batch_size_per_image, sampler.positive_fraction)
            wanted = encoded(rpn.box_coder, boxes, which, index, everywhere)
            objects = (goal.gather(1, index) == 1) & used
        number = used.sum()
        single = F.binary_cross_entropy_with_logits(scores.gather(1, index), objects.float(), reduction="none")
        return proposals, {
            "loss_objectness": single.where(used, 0).sum() / number,
            "loss_rpn_box_reg": box_loss(at(steps, index), wanted, objects) / number,
        }

    def _regions(
        self, features: Tensor, proposals: list[Tensor], boxes: Tensor, labels: Tensor, side: int
    ) -> dict[str, Tensor]:
        heads = self.detector.roi_heads
        with torch.no_grad():
            padded = pad_sequence(proposals, batch_first=True, padding_value=-1)
            candidates = torch.cat([padded, boxes], 1)  # what is to be found is among the candidates
            present = torch.cat([padded[..., 2] >= 0, labels > 0], 1)
            _, which, goal = matched(candidates, boxes, labels > 0, heads.proposal_matcher)
            sampler = heads.fg_bg_sampler
            index, used = drawn(
                (goal == 1) & present, (goal == 0) & present, sampler.batch_size_per_image, sampler.positive_fraction
            )
            regions = at(candidates, index)
            objects = (goal.gather(1, index) == 1) & used
            classes = torch.where(objects, labels.gather(1, which.gather(1, index)), 0)
            wanted = encoded(heads.box_coder, boxes, which, index, candidates)
        pooled = heads.box_roi_pool({"0": features}, list(regions), [(side, side)] * len(boxes))
        with torch.autocast(features.device.type, self.half or torch.bfloat16, enabled=self.half is not None):
            logits, steps = heads.box_predictor(heads.box_head(pooled))
        steps = steps.float().view(*index.shape, -1, 4)
        mine = steps.gather(2, classes[..., None, None].expand(-1, -1, 1, 4)).squeeze(2)
        number = used.sum()
        classes = classes.where(used, -100).flatten()  # cross_entropy passes over -100
        return {
            "loss_classifier": F.cross_entropy(logits.float(), classes),
            "loss_box_reg": box_loss(mine, wanted, objects) / number,
        }


def normalised(pictures: Tensor) -> Tensor:
    """Bytes to what VGG-16 expects."""
    mean, std = (torch.tensor(values, device=pictures.device).view(3, 1, 1) for values in (MEAN, STD))
    return ((pictures.float() / 255 - mean) / std).contiguous(memory_format=torch.channels_last)


def at(values: Tensor, index: Tensor) -> Tensor:
    """b x n x 4 and b x k -> b x k x 4."""
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[-1]))


def clipped(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Inside their pictures, and never empty; numbers even if training went wrong, or pooling would read anywhere."""
    boxes = boxes.nan_to_num()
    heights, widths = sizes.to(boxes)[:, None].unbind(-1)
    low_x, high_x = (boxes[..., side].clamp(min=0).minimum(widths) for side in (0, 2))
    low_y, high_y = (boxes[..., side].clamp(min=0).minimum(heights) for side in (1, 3))
    return torch.stack([low_x, low_y, high_x.maximum(low_x + SMALLEST), high_y.maximum(low_y + SMALLEST)], -1)


def overlaps(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union: b x m x 4 and b x n x 4 -> b x m x n."""
    low = torch.maximum(a[:, :, None, :2], b[:, None, :, :2])
    high = torch.minimum(a[:, :, None, 2:], b[:, None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (a, b)]
    return shared / (areas[0][:, :, None] + areas[1][:, None] - shared)


def matched(candidates: Tensor, boxes: Tensor, real: Tensor, matcher: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Overlaps (b x m x n, -1 for no object), the object that fits each candidate best, and whether it is that object
    (1), background (0) or neither (-1)."""
    overlap = overlaps(boxes, candidates).where(real[..., None], -1.0)
    best, which = overlap.max(1)
    goal = torch.full_like(which, -1)
    goal[best >= matcher.high_threshold] = 1
    goal[best < matcher.low_threshold] = 0
    return overlap, which, goal


def drawn(positive: Tensor, negative: Tensor, count: int, share: float) -> tuple[Tensor, Tensor]:
    """Places of ``count`` candidates a picture (b x count), at most ``share`` of them positive, and which are meant."""
    luck = torch.rand(positive.shape, device=positive.device)
    among, total = int(count * share), positive.shape[1]
    first = luck.where(positive, -1.0).topk(min(among, total))
    taken = torch.zeros_like(positive).scatter(1, first.indices, first.values >= 0)
    found = torch.where(taken, luck + 2, luck.where(negative, -1.0)).topk(min(count, total))
    return found.indices, found.values >= 0


def encoded(coder: Any, boxes: Tensor, which: Tensor, index: Tensor, candidates: Tensor) -> Tensor:
    """The steps (b x k x 4) from the candidates at ``index`` to their objects; without meaning where there is none."""
    objects, places = at(boxes, which.gather(1, index)), at(candidates, index)
    return coder.encode_single(objects.reshape(-1, 4), places.reshape(-1, 4)).view_as(places)


def box_loss(steps: Tensor, wanted: Tensor, objects: Tensor) -> Tensor:
    """Summed over the candidates that are objects."""
    meant = objects[..., None]
    # Zeros before the loss: infinities that are multiplied by 0 afterwards would be no number.
    return F.smooth_l1_loss(steps.where(meant, 0), wanted.where(meant, 0), beta=BETA, reduction="sum")
