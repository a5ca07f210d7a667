"""Top-1 and top-5 accuracy, and agreement between two networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leanconv.errors import LeanconvError, Unreadable
from leanconv.network.user_model import model_failed

if TYPE_CHECKING:  # training uses this module, and reads no pictures
    from leanconv.evaluation.class_names import ClassIndices
    from leanconv.images.loading import PictureSet

# The name of a single network in errors.
NAMELESS = "the model"


@dataclass(frozen=True)
class Accuracy:
    """Shares of images whose class is the first, or among the first five, of the network's answers. Printed, a line.

    ``about``: the data, the views of an image, and the images that could not be read.
    """

    top1: float
    top5: float
    images: int
    model: str = NAMELESS
    about: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"top1": self.top1, "top5": self.top5, "images": self.images, **self.about, "model": self.model}

    def __str__(self) -> str:
        return f"{self.model}: top-1 {100 * self.top1:.2f} %, top-5 {100 * self.top5:.2f} % of {self.images} images"


@contextmanager
def judging(*models: nn.Module) -> Iterator[None]:
    """No gradients, and these networks in eval mode. Afterwards every layer has its old mode."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def logits_of(model: nn.Module, batches: Iterable[Tensor], device: torch.device | str) -> Tensor:
    """Outputs (n x classes, float32, CPU) of ``model`` in eval mode; its mode is put back."""
    with judging(model):
        return torch.cat([class_scores(model(as_taken(model, batch.to(device)))).float().cpu() for batch in batches])


def as_taken(model: nn.Module, images: Tensor) -> Tensor:
    """``images`` in the precision of the network's weights."""
    weight = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), images)
    return images.to(weight.dtype) if images.is_floating_point() else images


def answers(
    models: Sequence[tuple[str, nn.Module]],
    batches: Iterable[tuple[Tensor, Sequence[Any]]],
    classes: ClassIndices,
    device: torch.device | str,
    *,
    at_once: int | None = None,
    step: Callable[[], None] = lambda: None,
) -> tuple[list[Tensor], Tensor]:
    """Outputs of every named network (n x classes each, float32, CPU) on the same batches, and the true classes.

    ``batches``: images with the pictures they come from, or other objects with a ``name`` and a ``label``. A batch of
    pictures x views x channels x height x width is run ``at_once`` views at a time; its outputs are the logarithms of
    the probabilities averaged over the views.
    """
    outputs: list[list[Tensor]] = [[] for _ in models]
    labels: list[int] = []
    with judging(*(model.to(device) for _, model in models)):
        for batch, pictures in batches:
            there = batch.to(device)
            scores = [_answer(name, model, there, at_once, pictures[0].name) for name, model in models]
            counts = [each.shape[1] for each in scores]
            if len(set(counts)) > 1:
                parts = [f"{name} has {count} outputs" for (name, _), count in zip(models, counts, strict=True)]
                raise LeanconvError(f"{' and '.join(parts)}; give networks with the same classes.")
            classes.check(counts[0])
            for results, result in zip(outputs, scores, strict=True):
                results.append(result)
            labels += [classes[picture.label or ""] for picture in pictures]
            step()
    if not labels:
        raise LeanconvError("none of the images could be read; repair or replace them.")
    return [torch.cat(results) for results in outputs], torch.tensor(labels)


def _answer(name: str, model: nn.Module, batch: Tensor, at_once: int | None, first: str) -> Tensor:
    """Class scores of one batch, finite. ``first``: the name of its first picture."""
    views = batch.flatten(0, 1) if batch.dim() == 5 else batch
    try:
        outputs = [model(as_taken(model, part)) for part in views.split(at_once or len(views))]
    except Exception as error:
        refusal = model_failed(error, views)
        raise (refusal if name == NAMELESS else LeanconvError(f"{name}: {refusal}")) from error
    scores = torch.cat([class_scores(output) for output in outputs]).float()
    if not bool(torch.isfinite(scores).all()):
        raise LeanconvError(
            f"{name} answers NaN or infinity on {first} or the images after it; check its weights and the "
            "preprocessing."
        )
    return (averaged(scores, batch.shape[1]) if batch.dim() == 5 else scores).cpu()


def averaged(logits: Tensor, views: int) -> Tensor:
    """Logarithms of class probabilities averaged over views: (n * views) x classes -> n x classes."""
    logarithms = logits.log_softmax(1).reshape(-1, views, logits.shape[1])
    return logarithms.logsumexp(1) - math.log(views)


def class_scores(output: object) -> Tensor:
    """``output``, if it is a tensor n x classes; else refused."""
    if isinstance(output, Tensor) and output.dim() == 2:
        return output
    shape = f" of shape {tuple(output.shape)}" if isinstance(output, Tensor) else ""
    raise LeanconvError(
        f"the model returned a {type(output).__name__}{shape} where images x classes is needed: only "
        "classifiers can be judged by classes."
    )


def class_count(model: nn.Module, pictures: PictureSet) -> int:
    """The number of the network's classes, from its output for the first picture that can be read."""
    for index in range(len(pictures)):
        try:
            image = pictures[index][0][None]
        except Unreadable:
            continue
        try:
            with torch.no_grad():
                output = model(as_taken(model, image))
        except Exception as error:
            raise model_failed(error, image) from error
        return class_scores(output).shape[1]
    raise LeanconvError(f"none of the {len(pictures)} images could be read; repair or replace them.")


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """n x 2 booleans: whether an image's class is the first answer, and whether it is among the first five."""
    ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
    return torch.stack([ranked[:, 0], ranked.any(dim=1)], dim=1)


def accuracy(logits: Tensor, labels: Tensor, **about: Any) -> Accuracy:
    """``logits`` n x classes, ``labels`` n class indices."""
    top1, top5 = correct(logits, labels).double().mean(dim=0).tolist()
    return Accuracy(top1, top5, len(labels), **about)


def agreement(logits: Tensor, reference: Tensor) -> float:
    """Share of images on which two networks give the same first answer."""
    return (logits.argmax(dim=1) == reference.argmax(dim=1)).double().mean().item()
