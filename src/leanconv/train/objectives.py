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

Maps = dict[str, list[Tensor]]  # of a place, one a call


class Judged(NamedTuple):
    """Of every image (n): ``loss``, and whether the network was ``right``: its first answer is the label, or that of
    the original; None where there is no such thing."""

    loss: Tensor
    right: Tensor | None


class Goal(Protocol):
    right: str  # what being right means

    def __call__(self, network: nn.Module, images: Tensor, labels: Tensor | None) -> Judged:
        """``labels`` where they were made: looking at them on a GPU would wait for it."""


class WithGoal(nn.Module):
    """A network together with its goal. DistributedDataParallel looks for the weights that are not used in what comes
    out of it: that must be the loss, since a goal need not look at the network's answer."""

    def __init__(self, network: nn.Module, goal: Goal):
        super().__init__()
        self.network, self.goal = network, goal

    def forward(self, images: Tensor, labels: Tensor | None) -> Judged:
        return self.goal(self.network, images, labels)


def feature_layers(changes: Sequence[Change], count: int | None) -> list[str]:
    """Modules whose outputs both networks have: so many of the replaced layers, evenly spread, the last among them;
    None: all that have their response."""
    names = [change.batch_norm or change.name for change in changes if not change.open]
    count = len(names) if count is None else min(count, len(names))
    return [names[round((number + 1) * len(names) / count) - 1] for number in range(count)]


class Supervised:
    """Cross entropy with the labels."""

    right = "top-1"

    def __call__(self, network: nn.Module, images: Tensor, labels: Tensor | None) -> Judged:
        assert labels is not None
        output = network(images)
        # Networks with auxiliary heads answer with several tensors while they train; these are the answer.
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
    """Feature maps and outputs as the original network has them, without labels.

    Loss of an image: the mean, over the ``places``, of ||f - f~||^2 / ||f||^2, plus ``outputs`` times the KL divergence
    of the class scores (relative squared distance of outputs that are none). At a place (a module of both networks) the
    two have the same meaning: the response of a layer that was replaced.

    Feature maps alone are the better goal: every position of every map of an image says something, where the class
    scores say little that the original has not learnt by heart, and a few images are fitted at the cost of all others.
    """

    right = "agreement"

    def __init__(self, original: nn.Module, places: Sequence[str], outputs: float):
        self.original, self.outputs = original, outputs
        self.places = tuple(places)

    def __call__(self, network: nn.Module, images: Tensor, labels: Tensor | None) -> Judged:
        with torch.no_grad(), _watched(self.original, self.places) as target_maps:
            target = self.original(images)
        with _watched(network, self.places) as maps:
            output = network(images)
        distances = self._distances(maps, target_maps, len(images))
        right = output.argmax(1) == target.argmax(1) if _are_scores(output, target) else None
        if not self.outputs:
            # The divergence is not even multiplied by zero: where a head has no finite slope that would be NaN.
            return Judged(torch.stack(distances).mean(0), right)
        loss = self.outputs * _divergence(output, target, len(images))
        return Judged(loss + torch.stack(distances).mean(0) if distances else loss, right)

    def _distances(self, maps: Maps, targets: Maps, count: int) -> list[Tensor]:
        """Of every place whose maps go image by image: those behind a detector's boxes do not."""
        distances = []
        for place in self.places:
            pairs = list(zip(maps[place], targets[place], strict=True))
            if all(len(target) == count for _, target in pairs):
                distances.append(torch.stack([_relative(*pair) for pair in pairs]).mean(0))
        if self.places and not distances:
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
    """Of every image: the KL divergence of class scores, the relative squared distance of outputs that are none."""
    if _are_scores(output, target):
        logs, target_logs = output.float().log_softmax(1), target.float().log_softmax(1)
        return F.kl_div(logs, target_logs, reduction="none", log_target=True).sum(1)
    pairs = zip(tensors(output), tensors(target), strict=True)
    fitting = [(a, b) for a, b in pairs if b.is_floating_point() and b.dim() and a.shape == b.shape and len(b) == count]
    if not fitting:
        raise LeanconvError(
            "the network's outputs hold nothing that goes image by image and fits the original's; distillation "
            "compares outputs."
        )
    return torch.stack([_relative(a, b) for a, b in fitting]).mean(0)


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
    """||x||^2 of every image, in single precision at least, without a copy in it or in another layout: of large maps
    either would take longer than the rest."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.dim() == 1:  # a number an image
        return x.to(dtype).square()
    norm: Tensor = torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim())), dtype=dtype)
    return norm.square()


class _Distance(torch.autograd.Function):
    """||f~ - f||^2 / size of every image. The slope, 2 (f~ - f) / size, is one product in the layout of the map, where
    torch's own way through the norm takes several over numbers in single precision."""

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
def _watched(network: nn.Module, places: Sequence[str]) -> Iterator[Maps]:
    """Outputs of the modules at ``places``, one a call, as they are when the network is done: behind an activation in
    place."""
    seen: Maps = {place: [] for place in places}

    def hook(place: str) -> Any:
        def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
            seen[place].append(output)

        return note

    handles = [network.get_submodule(place).register_forward_hook(hook(place)) for place in places]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
