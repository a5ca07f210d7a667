"""The last step of ``accelerate(refine="distill")``: the network trained on the calibration images, without labels."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import Batch, Batches, take, to_device
from leanconv.calibrate.memory import Memory
from leanconv.errors import LeanconvError, listing
from leanconv.network.torchvision_detectors import kind_of
from leanconv.network.user_model import device_of
from leanconv.result import Accelerated
from leanconv.system.precision import chosen_kernels
from leanconv.train.augment import crop_and_flip
from leanconv.train.dataset import Augment, Examples
from leanconv.train.finetune import finetune
from leanconv.train.objectives import Distillation

# Settings that are not here have the defaults of finetune with an original.
EPOCHS, STEPS = 100, 1200  # at most; the last epoch is always finished
# Images a step: 50; fewer where an epoch would have under 18 steps, more where it would have over 200.
SMALLEST_BATCH, BATCH, LARGEST_BATCH = 16, 50, 256
SHORT, LONG = 18, 200
LR = 2e-3  # up to BATCH images a step; with more it rises, as the gradient is less noisy
HOLDOUT = 0.1
FEWEST = 10  # images, so that one is held out
# Of fewer images than these, the tenth is held out of the closed form too, which fits few images so closely that it
# looks better on them than anything training can give. With more images that effect is smaller than the gain of
# training; then the layers are fitted to all of them, and a workdir's layers serve refine="closed-form" too.
FEW = 500
PATIENCE = 20  # epochs without a better network before training stops
SHIFT = 14  # images are moved by up to 1/14 of their smaller side,
SMALLEST = 8  # if that has at least 8 pixels

INSTEAD = "use refine='closed-form' instead"


def check_distillable(model: nn.Module, processes: int) -> None:
    """Refuse what cannot be distilled, whatever the images."""
    if processes > 1:
        raise LeanconvError(
            f"refine='distill' trains in one process, and there are {processes}; use refine='closed-form' and then "
            "leanconv.finetune(result, images, model), which shares the images out."
        )
    if kind_of(model) is not None:
        raise LeanconvError(
            f"refine='distill' does not train detectors, and a {type(model).__name__} was given; {INSTEAD}."
        )


def check_examples(original: nn.Module, layers: Iterable[str], batches: Batches) -> None:
    """Refuse images that cannot be trained on (all of them are read), and a network without gradients."""
    pieces = _pieces(batches)
    odd = [type(piece).__name__ for piece in pieces if not isinstance(piece, Tensor)]
    if odd:
        raise LeanconvError(
            f"refine='distill' takes batches that are tensors of images, and a {odd[0]} was given; {INSTEAD}."
        )
    kinds = sorted({f"{' x '.join(map(str, piece.shape[1:]))} {str(piece.dtype)[6:]}" for piece in pieces})
    if len(kinds) > 1:
        raise LeanconvError(
            f"refine='distill' takes images of one size and dtype, and {listing(kinds, 3)} were given; bring them to "
            f"one, or {INSTEAD}."
        )
    count = sum(len(piece) for piece in pieces)
    if count < FEWEST:
        raise LeanconvError(
            f"refine='distill' holds out a tenth of the images, and {count} were given; give at least {FEWEST}, or "
            f"{INSTEAD}."
        )
    sample = to_device(batches.sample(), device_of(original))
    if not sample.is_floating_point():
        return
    try:
        with torch.enable_grad():
            # Times one: autograd does not let a network change its leaf, the images themselves, in place.
            loss = Distillation(original, list(layers), 0.0)(original, sample.requires_grad_() * 1, None).loss
    except LeanconvError:
        raise LeanconvError(
            f"refine='distill' compares feature maps image by image, and no layer of this network has such; {INSTEAD}."
        ) from None
    if not loss.requires_grad:
        raise LeanconvError(
            f"refine='distill' trains the network, and its layers ran without gradients (torch.no_grad in its "
            f"forward?); {INSTEAD}."
        )


def are_few(images: int) -> bool:
    """Whether the images that training is judged by are put aside before the layers are fitted. ``images``: all that
    were given."""
    return images < FEW


def put_aside(batches: Batches, seed: int) -> tuple[Batches, Tensor]:
    """The images that the layers are fitted to, and a tenth of ``batches``, to judge the training by."""
    fitted = take(iter(_pieces(batches)))
    fitted.put_aside(round(HOLDOUT * fitted.images), seed)
    return fitted, torch.cat([piece.to(fitted.aside[0].device) for piece in fitted.aside])


def joined(batches: Batches, memory: Memory) -> Tensor:
    """The images as one tensor, on the GPU if there is room: moving them there step by step takes longer."""
    pieces = tuple(_pieces(batches))
    room = memory.reserve(sum(piece.nbytes for piece in pieces), share=0.5, among=("device",))
    # Counted here: batches count pictures that cannot be read, too.
    whole = Batch(0, sum(len(piece) for piece in pieces), pieces)
    images: Tensor = whole.on(pieces[0].device if room is None else memory.device)
    return images.detach()  # autograd may follow the user's images


def _pieces(batches: Batches) -> list[Any]:
    return [piece for batch in batches for piece in batch.pieces]


def distilled(
    result: Accelerated,
    original: nn.Module,
    images: Tensor,
    judges: Tensor | None,
    *,
    steps: int | None,
    seed: int,
    device: torch.device,
    workdir: str | os.PathLike[str] | None,
    progress: bool,
) -> Accelerated:
    """``result``, trained towards the feature maps of ``original``: the network that is best on images held out, which
    may be that of ``result``. ``judges``: those images, if they were put aside; else a tenth of ``images`` is."""
    # Layers that the user has frozen were replaced and fitted too.
    frozen = [not parameter.requires_grad for parameter in result.model.parameters()]
    result.model.requires_grad_(True)
    aside = 0 if judges is None else len(judges)
    epochs, batch, lr = course(len(images) + aside, steps)
    with chosen_kernels(benchmark=False, deterministic=True):
        tuned = finetune(
            result,
            images,
            original,
            validation=judges,
            augment=_augment(images),
            epochs=epochs,
            batch=batch,
            lr=lr,
            holdout=HOLDOUT,
            patience=PATIENCE,
            workdir=workdir,
            seed=seed,
            device=device,
            progress=progress,
        )
    for parameter, was in zip(tuned.model.parameters(), frozen, strict=True):
        parameter.requires_grad_(not was)
    assert tuned.result is not None
    return replace(tuned.result, images=result.images + aside)


def course(images: int, steps: int | None = None) -> tuple[int, int, float]:
    """Epochs, images a step and learning rate; the fewer images, the more epochs. ``steps``: those the user asks for,
    however many epochs that is."""
    training = images - round(HOLDOUT * images)
    batch = min(LARGEST_BATCH, max(SMALLEST_BATCH, min(BATCH, training // SHORT), training // LONG))
    per_epoch = Examples.steps(range(training), batch)
    epochs = min(EPOCHS, math.ceil(STEPS / per_epoch)) if steps is None else math.ceil(steps / per_epoch)
    return epochs, batch, LR * math.sqrt(max(1.0, batch / BATCH))


def _augment(images: Tensor) -> Augment | None:
    """For pictures, n x c x h x w; anything else is trained on as it is."""
    if images.dim() != 4 or min(images.shape[2:]) < SMALLEST:
        return None
    return crop_and_flip(max(1, min(images.shape[2:]) // SHIFT), reflect=True)
