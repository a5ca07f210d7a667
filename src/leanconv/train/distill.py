"""The last step of ``accelerate(refine="distill")``: the network trained on the calibration images, without labels."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import replace

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

# Where these say nothing, the defaults of finetune with an original.
EPOCHS, STEPS = 100, 1200  # at most, and to the end of an epoch
# Images a step: 50, fewer where an epoch would have under 18 steps, more where it would have over 200.
SMALLEST_BATCH, BATCH, LARGEST_BATCH = 16, 50, 256
SHORT, LONG = 18, 200
LR = 2e-3  # up to BATCH images a step; beyond, as the noise of the gradient falls, it rises
HOLDOUT = 0.1
FEWEST = 10  # images there must be, so that one is held out
# Of fewer images than these the tenth is held out of the closed form too. It is fitted to few images so closely that by
# them it looks better than anything training can make of it. More images, or less of a fit to each, and what is left of
# that is less than what training gains; then every image is fitted to, and a workdir's layers serve both.
FEW = 500
PATIENCE = 20  # epochs without a better network before it stops
SHIFT = 14  # images are moved by up to this part of their smaller side,
SMALLEST = 8  # if that has so many pixels

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
    """Refuse images that cannot be trained on, all of which are read, and a network no gradient goes through."""
    pieces = [piece for batch in batches for piece in batch.pieces]
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
            # Not the images themselves: a network may work in place, which where a graph begins is not allowed.
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
    """Whether those the training is judged by are put aside before the layers are fitted."""
    return images < FEW


def put_aside(batches: Batches, seed: int) -> tuple[Batches, Tensor]:
    """What the layers are fitted to, and a tenth of the images to judge the training by."""
    pieces = [piece for batch in batches for piece in batch.pieces]
    count = sum(map(len, pieces))
    judging = torch.zeros(count, dtype=torch.bool)
    judging[torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: round(HOLDOUT * count)]] = True
    masks = [mask.to(piece.device) for mask, piece in zip(judging.split([*map(len, pieces)]), pieces, strict=True)]
    pieces = [piece.detach() for piece in pieces]
    rest = [piece[~mask] for piece, mask in zip(pieces, masks, strict=True)]
    judges = torch.cat([piece[mask].to(pieces[0].device) for piece, mask in zip(pieces, masks, strict=True)])
    return take([part for part in rest if len(part)]), judges


def joined(batches: Batches, memory: Memory) -> Tensor:
    """The images as one tensor: on the GPU, where there is room, as moving them there step by step takes longer."""
    pieces = tuple(piece for batch in batches for piece in batch.pieces)
    room = memory.reserve(sum(piece.nbytes for piece in pieces), share=0.5, among=("device",))
    # Not as many as the batches count: pictures that cannot be read have a number too.
    whole = Batch(0, sum(len(piece) for piece in pieces), pieces)
    images: Tensor = whole.on(pieces[0].device if room is None else memory.device)
    return images.detach()  # the user's may be followed by autograd


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
    """``result`` trained to have the feature maps of ``original``: the best network seen on images held out, which may
    be the one given. ``judges``: those images, if they were put aside; else a tenth of ``images`` is."""
    # A layer the user has frozen is replaced and fitted all the same.
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
    """Epochs, images a step and learning rate: few images are gone through often, many of them a few times. ``steps``
    that were asked for are taken, however many epochs that is."""
    training = images - round(HOLDOUT * images)
    batch = min(LARGEST_BATCH, max(SMALLEST_BATCH, min(BATCH, training // SHORT), training // LONG))
    each = Examples.steps(range(training), batch)
    epochs = min(EPOCHS, math.ceil(STEPS / each)) if steps is None else math.ceil(steps / each)
    return epochs, batch, LR * math.sqrt(max(1.0, batch / BATCH))


def _augment(images: Tensor) -> Augment | None:
    """Of pictures, n x c x h x w; anything else is trained on as it is."""
    if images.dim() != 4 or min(images.shape[2:]) < SMALLEST:
        return None
    return crop_and_flip(max(1, min(images.shape[2:]) // SHIFT), reflect=True)
