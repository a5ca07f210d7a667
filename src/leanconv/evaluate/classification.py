"""Top-1 and top-5 accuracy, and agreement between two networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leanconv.errors import LeanconvError
from leanconv.evaluate.labels import ClassIndices
from leanconv.images.find import Picture
from leanconv.network.failure import model_failed


@dataclass(frozen=True)
class Accuracy:
    """Shares of images whose class is the first, or among the first five, of the network's answers."""

    top1: float
    top5: float
    images: int


def logits_of(model: nn.Module, batches: Iterable[Tensor], device: torch.device | str) -> Tensor:
    """Outputs (n x classes, float32, CPU) of ``model`` in eval mode; its mode is put back."""
    training = model.training
    model.eval()
    found = []
    try:
        with torch.no_grad():
            for batch in batches:
                found.append(class_scores(model(batch.to(device))).float().cpu())
    finally:
        model.train(training)
    return torch.cat(found)


def logits_and_labels(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, list[Picture]]],
    classes: ClassIndices,
    device: torch.device | str,
    *,
    step: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Outputs and true classes of labelled pictures, as they are read. Labels are checked at the first batch."""
    model = model.to(device).eval()
    found: list[Tensor] = []
    labels: list[int] = []
    with torch.no_grad():
        for batch, pictures in batches:
            try:
                output = model(batch.to(device))
            except Exception as error:
                raise model_failed(error, batch) from error
            scores = class_scores(output).float().cpu()
            if not bool(torch.isfinite(scores).all()):
                raise LeanconvError(
                    f"the model answers NaN or infinity on {pictures[0].name} or the images after it; check "
                    "its weights and the preprocessing."
                )
            if not found:
                classes.check(scores.shape[1])
            found.append(scores)
            labels += [classes[picture.label or ""] for picture in pictures]
            step()
    if not found:
        raise LeanconvError("none of the images could be read; repair or replace them.")
    return torch.cat(found), torch.tensor(labels)


def class_scores(output: object) -> Tensor:
    """The n x classes tensor in a classifier's output, or a sentence saying what came instead."""
    if isinstance(output, Tensor) and output.dim() == 2:
        return output
    shape = f" of shape {tuple(output.shape)}" if isinstance(output, Tensor) else ""
    raise LeanconvError(
        f"the model returned a {type(output).__name__}{shape} where images x classes is needed; evaluate takes "
        "classifiers."
    )


def accuracy(logits: Tensor, labels: Tensor) -> Accuracy:
    """``logits`` n x classes, ``labels`` n class indices."""
    ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
    return Accuracy(
        top1=ranked[:, 0].double().mean().item(),
        top5=ranked.any(dim=1).double().mean().item(),
        images=len(labels),
    )


def agreement(logits: Tensor, reference: Tensor) -> float:
    """Share of images on which two networks give the same first answer."""
    return (logits.argmax(dim=1) == reference.argmax(dim=1)).double().mean().item()
