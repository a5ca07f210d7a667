"""What training makes small: the error against labels, or the distance to the original network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leanconv.errors import LeanconvError
from leanconv.evaluate.classification import class_scores
from leanconv.network.recording import tensors


@dataclass(frozen=True)
class Judged:
    """Of every image (n): ``loss``, and whether the network was ``right``: its first answer is the label, or that of
    the original; None where there is no such thing."""

    loss: Tensor
    right: Tensor | None


class Goal(Protocol):
    right: str  # what being right means

    def __call__(self, network: nn.Module, images: Tensor, labels: Tensor | None) -> Judged:
        """``labels`` where they were made: looking at them on a GPU would wait for it."""


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
        wanted = labels.to(scores.device, non_blocking=True)
        return Judged(F.cross_entropy(scores, wanted, reduction="none"), scores.argmax(1) == wanted)


class Distillation:
    """Outputs and some feature maps as the original network has them, without labels.

    Loss of an image: the KL divergence of the class scores (relative squared distance of outputs that are none), plus
    ``weight`` times the mean, over the ``places``, of ||f - f~||^2 / ||f||^2. At a place (a module of both networks)
    the two have the same meaning: the response of a layer that was replaced.
    """

    right = "agreement"

    def __init__(self, original: nn.Module, places: Sequence[str], weight: float = 1.0):
        self.original, self.weight = original, weight
        self.places = tuple(places)

    def __call__(self, network: nn.Module, images: Tensor, labels: Tensor | None) -> Judged:
        with torch.no_grad(), _watched(self.original, self.places) as wanted:
            answer = self.original(images)
        inner = network.module if isinstance(network, nn.parallel.DistributedDataParallel) else network
        with _watched(inner, self.places) as found:
            given = network(images)
        loss, right = _outputs(given, answer, len(images))
        if self.places and self.weight:
            distances = [_relative(found[place], wanted[place], len(images)) for place in self.places]
            loss = loss + self.weight * torch.stack(distances).mean(0)
        return Judged(loss, right)


def _outputs(given: Any, answer: Any, count: int) -> tuple[Tensor, Tensor | None]:
    if isinstance(answer, Tensor) and answer.dim() == 2 and answer.shape[1] > 1 and isinstance(given, Tensor):
        if given.shape != answer.shape:
            raise LeanconvError(
                f"the network answers {tuple(given.shape)} where the original answers {tuple(answer.shape)}; give the "
                "network that was accelerated."
            )
        scores, wanted = given.float(), answer.float()
        divergence = F.kl_div(scores.log_softmax(1), wanted.log_softmax(1), reduction="none", log_target=True)
        return divergence.sum(1), scores.argmax(1) == wanted.argmax(1)
    pairs = list(zip(tensors(given), tensors(answer), strict=True))
    fitting = [(a, b) for a, b in pairs if b.is_floating_point() and a.shape == b.shape and len(b) == count]
    if not fitting:
        raise LeanconvError(
            "the network's outputs hold nothing that goes image by image and fits the original's; distillation "
            "compares outputs."
        )
    return torch.stack([_relative(a, b, count) for a, b in fitting]).mean(0), None


def _relative(found: Tensor, wanted: Tensor, count: int) -> Tensor:
    """||f - f~||^2 / ||f||^2 of every image."""
    if len(wanted) != count:
        raise LeanconvError("a feature map does not go image by image; give features=0.")
    if found.shape != wanted.shape:
        raise LeanconvError(
            f"a layer responds with {tuple(found.shape)} where that of the original responds with "
            f"{tuple(wanted.shape)}; give the network that was accelerated, or features=0."
        )
    found, wanted = found.float().flatten(1), wanted.float().flatten(1)
    # A map of the original may be zero on some image: a small share of the network's own keeps the quotient finite.
    size = torch.maximum(wanted.square().sum(1), 1e-3 * found.detach().square().sum(1))
    return (found - wanted).square().sum(1) / size.clamp_min(torch.finfo(torch.float32).tiny)


@contextmanager
def _watched(network: nn.Module, places: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Outputs of the modules at ``places``, as they are when the network is done: behind an activation in place."""
    seen: dict[str, Tensor] = {}

    def hook(place: str) -> Any:
        def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
            seen[place] = output

        return note

    handles = [network.get_submodule(place).register_forward_hook(hook(place)) for place in places]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
