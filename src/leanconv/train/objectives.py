"""What training makes small: the error against labels, or the distance to the original network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from leanconv.errors import LeanconvError
from leanconv.evaluation.classification import class_scores
from leanconv.forms.replace import Change
from leanconv.network.function_trace import tensors

Maps = dict[str, list[Tensor]]  # module name -> its outputs, one for each call


class Judged(NamedTuple):
    """Of n images: the ``loss`` of each, and whether the network was ``right``: its first answer is the label, or that
    of the original; None for outputs that are no class scores."""

    loss: Tensor
    right: Tensor | None


class Goal(Protocol):
    right: str  # what the share of right answers is called

    def __call__(self, network: nn.Module, images: Tensor, labels: Tensor | None) -> Judged:
        """``labels`` are on the device of the data: reading them on a GPU would wait for it."""


class WithGoal(nn.Module):
    """A network together with its goal, whose output is the loss. DistributedDataParallel looks for unused weights in
    what its module returns, and a goal need not use the network's answer."""

    def __init__(self, network: nn.Module, goal: Goal):
        super().__init__()
        self.network, self.goal = network, goal

    def forward(self, images: Tensor, labels: Tensor | None) -> Judged:
        return self.goal(self.network, images, labels)


def feature_layers(changes: Sequence[Change], count: int | None) -> list[str]:
    """Names of modules whose outputs both networks have: ``count`` of the replaced layers, evenly spread up to the
    last; None: all that keep their response."""
    names = [change.batch_norm or change.name for change in changes if not change.open]
    count = len(names) if count is None else min(count, len(names))
    return [names[round((number + 1) * len(names) / count) - 1] for number in range(count)]


class Supervised:
    """Cross entropy with the labels."""

    right = "top-1"

    def __call__(self, network: nn.Module, images: Tensor, labels: Tensor | None) -> Judged:
        assert labels is not None
        output = network(images)
        # Networks with auxiliary heads return several tensors in training mode; the logits are the answer.
        scores = class_scores(getattr(output, "logits", output)).float()
        outside = (labels < 0) | (labels >= scores.shape[1])
        if bool(outside.any()):
            wrong = int(labels[outside][0])
            raise LeanconvError(
                f"there is a label {wrong}, but the network has {scores.shape[1]} outputs (classes 0 to "
                f"{scores.shape[1] - 1}); give labels that match."
            )
        labels = labels.to(scores.device, non_blocking=True)
        return Judged(F.cross_entropy(scores, labels, reduction="none"), scores.argmax(1) == labels)


class Distillation:
    """Feature maps and outputs as those of the original network, without labels.

    Loss of an image: the mean, over ``layers``, of ||f - f~||^2 / ||f||^2, plus ``outputs`` times the KL divergence of
    the class scores (relative squared distance of outputs that are none). ``layers`` are names of modules that both
    networks have and that mean the same in both: the response of a layer that was replaced.

    Feature maps alone are the better goal: every position of every map of an image says something. Class scores say
    little that the original has not learnt by heart, and fit a few images at the cost of all others.
    """

    right = "agreement"

    def __init__(self, original: nn.Module, layers: Sequence[str], outputs: float):
        self.original, self.layers, self.outputs = original, layers, outputs

    def __call__(self, network: nn.Module, images: Tensor, labels: Tensor | None) -> Judged:
        with torch.no_grad(), _watched(self.original, self.layers) as target_maps:
            target = self.original(images)
        with _watched(network, self.layers) as maps:
            output = network(images)
        distances = self._distances(maps, target_maps, len(images))
        right = output.argmax(1) == target.argmax(1) if _are_scores(output, target) else None
        if not self.outputs:
            # The divergence is not even multiplied by zero: where a head has no finite slope that would be NaN.
            return Judged(torch.stack(distances).mean(0), right)
        loss = self.outputs * _divergence(output, target, len(images))
        return Judged(loss + torch.stack(distances).mean(0) if distances else loss, right)

    def _distances(self, maps: Maps, targets: Maps, count: int) -> list[Tensor]:
        """Of every layer whose maps go image by image: those behind a detector's boxes do not."""
        distances = []
        for layer in self.layers:
            pairs = list(zip(maps[layer], targets[layer], strict=True))
            if all(len(target) == count for _, target in pairs):
                distances.append(torch.stack([_relative(*pair) for pair in pairs]).mean(0))
        if self.layers and not distances:
            raise LeanconvError("no feature map of a replaced layer goes image by image; give features=0.")
        return distances


def _are_scores(output: Any, target: Any) -> bool:
    """Whether both are class scores, n x classes."""
    if not (isinstance(target, Tensor) and target.dim() == 2 and target.shape[1] > 1 and isinstance(output, Tensor)):
        return False
    if output.shape != target.shape:
        raise LeanconvError(
            f"the network answers {tuple(output.shape)} where the original answers {tuple(target.shape)}; give the "
            "network that was accelerated."
        )
    return True


def _divergence(output: Any, target: Any, count: int) -> Tensor:
    """Of every image: the KL divergence of class scores, or the relative squared distance of other outputs."""
    if _are_scores(output, target):
        logs, target_logs = output.float().log_softmax(1), target.float().log_softmax(1)
        return F.kl_div(logs, target_logs, reduction="none", log_target=True).sum(1)
    distances = [
        _relative(ours, theirs)
        for ours, theirs in zip(tensors(output), tensors(target), strict=True)
        if theirs.is_floating_point() and theirs.dim() and ours.shape == theirs.shape and len(theirs) == count
    ]
    if not distances:
        raise LeanconvError(
            "the network's outputs hold nothing that goes image by image and fits the original's; distillation "
            "compares outputs."
        )
    return torch.stack(distances).mean(0)


def _relative(output: Tensor, target: Tensor) -> Tensor:
    """||f - f~||^2 / ||f||^2 of every image."""
    if output.shape != target.shape:
        raise LeanconvError(
            f"a layer responds with {tuple(output.shape)} where that of the original responds with "
            f"{tuple(target.shape)}; give the network that was accelerated, or features=0."
        )
    # A map of the original may be zero on some image: a small share of the network's own keeps the quotient finite.
    size = torch.maximum(_squared(target), 1e-3 * _squared(output.detach())).clamp_min(torch.finfo(torch.float32).tiny)
    distance: Tensor = _Distance.apply(output, target, size)
    return distance


def _squared(x: Tensor) -> Tensor:
    """||x||^2 of every image, in float32 at least. Large maps are not copied to float32 or to another layout: that
    would take longer than the rest."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.dim() == 1:  # one number for each image
        return x.to(dtype).square()
    norm: Tensor = torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim())), dtype=dtype)
    return norm.square()


class _Distance(torch.autograd.Function):
    """||f~ - f||^2 / size of every image. The gradient, 2 (f~ - f) / size, is one product in the layout and precision
    of the map; torch's own, through the norm, takes several in float32."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor, size: Tensor) -> Tensor:
        gap = output - target
        ctx.save_for_backward(gap, size)
        return _squared(gap) / size

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        gap, size = ctx.saved_tensors
        scale = (2 * slope / size).view(-1, *(1 for _ in gap.shape[1:]))
        # bfloat16 has the exponents of float32, float16 (of a network's own autocast) has not.
        return (gap * (scale if gap.dtype == torch.float16 else scale.to(gap.dtype))).to(gap.dtype), None, None


@contextmanager
def _watched(network: nn.Module, layers: Sequence[str]) -> Iterator[Maps]:
    """The outputs of ``layers``, a list of calls, when the network is done: behind in-place activations."""
    maps: Maps = {layer: [] for layer in layers}

    def hook(layer: str) -> Any:
        return lambda module, inputs, output: maps[layer].append(output)

    handles = [network.get_submodule(layer).register_forward_hook(hook(layer)) for layer in layers]
    try:
        yield maps
    finally:
        for handle in handles:
            handle.remove()
