"""Training an accelerated network: with labels, or without, from the original."""

from __future__ import annotations

import hashlib
import os
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from leanconv import __version__
from leanconv.calibrate.processes import Processes
from leanconv.errors import LeanconvError, listing, whole
from leanconv.network.user_model import check_model, copied, device_of, parse_device
from leanconv.progress import reporter
from leanconv.result import Accelerated
from leanconv.storage.workdir import digest_of_model
from leanconv.system.precision import chosen_kernels
from leanconv.system.random_state import untouched_rng
from leanconv.train.checkpoint import Checkpoint
from leanconv.train.dataset import Augment, Examples, Split
from leanconv.train.history import History
from leanconv.train.loop import Loop
from leanconv.train.objectives import Distillation, Goal, Supervised, feature_layers
from leanconv.train.settings import FinetuneConfig, Optimizer, Precision, Schedule


@dataclass(frozen=True)
class FineTuned:
    """The trained network in eval mode, and how it went. ``result``: what was given, with the new weights."""

    model: nn.Module
    history: History
    result: Accelerated | None

    def save(self, folder: str | Path) -> Path:
        """Like ``Accelerated.save``."""
        if self.result is None:
            raise LeanconvError("a plain module was fine-tuned; save model.state_dict(), or fine-tune an Accelerated.")
        return self.result.save(folder)

    def __str__(self) -> str:
        return str(self.history)


def finetune(
    network: Accelerated | nn.Module,
    data: Any,
    original: nn.Module | None = None,
    *,
    validation: Any = None,
    augment: Augment | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    optimizer: Optimizer | None = None,
    weight_decay: float = 0.0,
    schedule: Schedule | None = None,
    warmup: int | None = None,
    ema: float | None = None,
    clip: float = 0.0,
    precision: Precision = "auto",
    features: int | None = None,
    outputs: float | None = None,
    holdout: float = 0.1,
    patience: int = 0,
    workdir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    workers: int = 0,
    progress: bool = True,
) -> FineTuned:
    """Train a copy of ``network`` and return the best of it that was seen on images held out.

    Args:
        network: what ``accelerate`` returned, or any module. It is not modified.
        data: a pair of tensors (images, classes), or a dataset with a length whose items are (image, class). With
            ``original``, images alone will do: a tensor, or a dataset of images.
        original: train without labels, to have the feature maps of this network and so its answers.
        validation: images to judge by, as ``data``; default: a share ``holdout`` of ``data``, which is not trained on.
        augment: a batch of images in, as many out, changed; called for every batch that is trained on, and what it
            draws is fixed by ``seed`` (``leanconv.train.augment`` has one).
        workdir: a folder for the state of the run. A run that was killed goes on from there when it is called again
            with the same arguments, and ends in the same weights.
        device: where to train; default: where the network is.
        workers: processes that read a dataset's images.
        progress: show it.

    The other arguments are the options of ``leanconv.train.settings.FinetuneConfig``, which says what they mean.

    Under an initialised ``torch.distributed`` process group every process makes the same call and trains on its share.
    Batch norms keep their statistics.

    Raises:
        LeanconvError: for anything wrong with the arguments or the data, in one sentence.

    Examples:
        >>> import leanconv, torch
        >>> network, images = leanconv.models.character_cnn(), torch.rand(20, 1, 24, 24)
        >>> result = leanconv.accelerate(network, images, 2, solver="linear", samples=500, progress=False)
        >>> tuned = leanconv.finetune(result, images, network, epochs=1, batch=10, progress=False)
        >>> tuned.model(images).shape
        torch.Size([20, 36])
    """
    model = network.model if isinstance(network, Accelerated) else network
    check_model(model)
    options: dict[str, Any] = {
        "epochs": epochs,
        "batch": batch,
        "lr": lr,
        "optimizer": optimizer,
        "weight_decay": weight_decay,
        "schedule": schedule,
        "warmup": warmup,
        "ema": ema,
        "clip": clip,
        "precision": precision,
        "features": features,
        "outputs": outputs,
        "holdout": holdout,
        "patience": patience,
        "seed": seed,
    }
    config = FinetuneConfig(distill=original is not None, **options)
    workers = whole("workers", workers, 0)
    place = device_of(model) if device is None else parse_device(device)
    team = Processes(place)
    with untouched_rng(config.seed), torch.inference_mode(False), torch.enable_grad(), team.ending_together():
        examples = Examples(data, original is None, augment, workers)
        held = examples if validation is None else Examples(validation, original is None, None, workers)
        split = Split.of(examples, held, holdout=config.holdout, seed=config.seed, world=team.world)
        trained = _trainable(model, place)
        goal = _goal(network, original, place, config)
        arguments = {
            **asdict(config),
            "augment": _named(augment),
            **(_digests(model, original, split) if workdir is not None or team.world > 1 else {}),
            "processes": team.world,
            "leanconv": __version__,
            "torch": str(torch.__version__),
        }
        team.check_equal("arguments", arguments)
        steps = config.epochs * Examples.steps(split.training, config.batch * team.world)
        title = "fine-tuning" if original is None else "distilling"
        checkpoint = Checkpoint(workdir, arguments) if workdir is not None and team.is_main else None
        with (
            nullcontext() if checkpoint is None else closing(checkpoint),
            reporter(progress and team.is_main).stage(title, steps) as stage,
            _tried_kernels(),
        ):
            history = Loop(trained, goal, split, config, place, team, stage, checkpoint).run()
    _as_given(trained, model)
    summary = {"history": history.to_json(), "settings": asdict(config), "distilled": original is not None}
    result = replace(network, model=trained, training=summary) if isinstance(network, Accelerated) else None
    return FineTuned(trained, history, result)


def _tried_kernels() -> AbstractContextManager[None]:
    """cuDNN tries its kernels on the first batch: the same shapes come thousands of times. Not for who asked for the
    same bits every time."""
    now = torch.backends.cudnn
    return chosen_kernels(benchmark=now.benchmark or not now.deterministic, deterministic=now.deterministic)


def _as_given(trained: nn.Module, model: nn.Module) -> None:
    """Every tensor in the dtype, on the device and in the layout of the one it was copied from."""
    tensors, originals = ([*each.parameters(), *each.buffers()] for each in (trained, model))
    for tensor, original in zip(tensors, originals, strict=True):
        tensor.data = torch.empty_like(original).copy_(tensor.data)
        tensor.grad = None
        tensor.requires_grad_(original.requires_grad)


def _trainable(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy whose weights can be trained: single precision at least, and not frozen by having been loaded so."""
    if next(model.parameters(), None) is None:
        raise LeanconvError("the network has no weights to train; give one that has.")
    trained = _single(copied(model).to(device))
    if not any(parameter.requires_grad for parameter in trained.parameters()):
        trained.requires_grad_(True)
    return trained.eval()


def _single(model: nn.Module) -> nn.Module:
    half = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters())
    return model.float() if half else model


def _goal(
    network: Accelerated | nn.Module, original: nn.Module | None, device: torch.device, config: FinetuneConfig
) -> Goal:
    if original is None:
        return Supervised()
    check_model(original)
    places = feature_layers(network.changes, config.features) if isinstance(network, Accelerated) else []
    weight = float(not places) if config.outputs is None else config.outputs
    if not places and not weight:
        raise LeanconvError("with outputs=0 and no layer's responses to match there is nothing to train for.")
    missing = [place for place in places if place not in dict(original.named_modules())]
    if missing:
        raise LeanconvError(
            f"original has no layer {listing(missing, 2)}; give the network that was accelerated, or features=0."
        )
    teacher = _single(copied(original).to(device)).eval().requires_grad_(False)
    return Distillation(teacher, places, weight)


def _named(augment: Augment | None) -> str | None:
    """A function by its name: how it prints may differ from process to process."""
    if augment is None or is_dataclass(augment):
        return None if augment is None else repr(augment)
    if isinstance(augment, partial):
        return f"{_named(augment.func)} with {augment.args} {sorted(augment.keywords.items())}"
    kind = augment if hasattr(augment, "__qualname__") else type(augment)
    return f"{kind.__module__}.{kind.__qualname__}"


def _digests(model: nn.Module, original: nn.Module | None, split: Split) -> dict[str, Any]:
    """What another run or process must have in common with this one. Costs a copy of the data to the host."""
    return {
        "network": digest_of_model(model),
        "original": None if original is None else digest_of_model(original),
        "data": _digest(split.examples),
        "validation": None if split.held is split.examples else _digest(split.held),
    }


def _digest(examples: Examples) -> str:
    """Of tensors their numbers, of pictures their names and what is made of them, of other datasets the length."""
    total = hashlib.sha256(str(len(examples)).encode())
    for tensor in examples.tensors:
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    if hasattr(examples.data, "fingerprint"):
        total.update(examples.data.fingerprint().encode())
    return total.hexdigest()
