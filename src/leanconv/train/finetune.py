"""Training an accelerated network: with labels, or without, from the original."""

from __future__ import annotations

import os
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
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
    """The trained network in eval mode, and how it went. ``result``: the Accelerated that was given, with the new
    weights; None for a plain module."""

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
    """Train a copy of ``network``; return it with the weights that were best on images held out.

    Args:
        network: the result of ``accelerate``, or any module. It is not modified.
        data: a pair of tensors (images, classes), or a dataset with a length whose items are (image, class). With
            ``original``, images alone will do: a tensor, or a dataset of images.
        original: train without labels, towards the feature maps of this network and so its answers.
        validation: images to judge by, as ``data``; default: a share ``holdout`` of ``data``, which is not trained on.
        augment: a function that changes a batch of images, called for every batch that is trained on; ``seed`` fixes
            what it draws (``leanconv.train.augment`` has one).
        workdir: a folder for the state of the run. A run that was killed goes on from there when it is called again
            with the same arguments, and ends with the same weights.
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
    passed = locals()
    model = network.model if isinstance(network, Accelerated) else network
    check_model(model)
    options = {field.name: passed[field.name] for field in fields(FinetuneConfig)}
    config = FinetuneConfig(distill=original is not None, **options)
    workers = whole("workers", workers, 0)
    device = device_of(model) if device is None else parse_device(device)
    team = Processes(device)
    with untouched_rng(config.seed), torch.inference_mode(False), torch.enable_grad(), team.ending_together():
        examples = Examples(data, original is None, augment, workers)
        held = examples if validation is None else Examples(validation, original is None, None, workers)
        split = Split.of(examples, held, holdout=config.holdout, seed=config.seed, world=team.world)
        trained = _trainable(model, device)
        goal = _goal(network, original, device, config)
        arguments = {
            **asdict(config),
            "augment": _name_of(augment),
            **(_digests(model, original, split) if workdir is not None or team.world > 1 else {}),
            "processes": team.world,
            "leanconv": __version__,
            "torch": str(torch.__version__),
        }
        team.check_equal("arguments", arguments)
        steps = config.epochs * Examples.steps(split.training, config.batch * team.world)
        title = "fine-tuning" if original is None else "distilling"
        checkpoint = Checkpoint(workdir, arguments) if workdir is not None and team.is_main else None
        cudnn = torch.backends.cudnn
        with (
            nullcontext() if checkpoint is None else closing(checkpoint),
            reporter(progress and team.is_main).stage(title, steps) as stage,
            # Thousands of batches have one shape: cuDNN tries its kernels on the first, unless the user asked for the
            # same bits every time.
            chosen_kernels(benchmark=cudnn.benchmark or not cudnn.deterministic, deterministic=cudnn.deterministic),
        ):
            history = Loop(trained, goal, split, config, device, team, stage, checkpoint).run()
    _restore_form(trained, model)
    summary = {"history": history.to_json(), "settings": asdict(config), "distilled": original is not None}
    result = None
    if isinstance(network, Accelerated):  # what was checked is the network before
        result = replace(network, model=trained, training=summary, check=None)
    return FineTuned(trained, history, result)


def _restore_form(trained: nn.Module, model: nn.Module) -> None:
    """Give every tensor the dtype, device and layout of the one it was copied from."""
    tensors, originals = ([*each.parameters(), *each.buffers()] for each in (trained, model))
    for tensor, original in zip(tensors, originals, strict=True):
        tensor.data = torch.empty_like(original).copy_(tensor.data)
        tensor.grad = None
        tensor.requires_grad_(original.requires_grad)


def _trainable(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy whose weights can be trained: in float32 at least, and not all frozen."""
    if next(model.parameters(), None) is None:
        raise LeanconvError("the network has no weights to train; give one that has.")
    trained = _at_least_float32(copied(model).to(device))
    if not any(parameter.requires_grad for parameter in trained.parameters()):
        trained.requires_grad_(True)
    return trained.eval()


def _at_least_float32(model: nn.Module) -> nn.Module:
    half = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters())
    return model.float() if half else model


def _goal(
    network: Accelerated | nn.Module, original: nn.Module | None, device: torch.device, config: FinetuneConfig
) -> Goal:
    if original is None:
        return Supervised()
    check_model(original)
    layers = feature_layers(network.changes, config.features) if isinstance(network, Accelerated) else []
    weight = float(not layers) if config.outputs is None else config.outputs
    if not layers and not weight:
        raise LeanconvError("with outputs=0 and no layer's responses to match there is nothing to train for.")
    missing = [layer for layer in layers if layer not in dict(original.named_modules())]
    if missing:
        raise LeanconvError(
            f"original has no layer {listing(missing, 2)}; give the network that was accelerated, or features=0."
        )
    teacher = _at_least_float32(copied(original).to(device)).eval().requires_grad_(False)
    return Distillation(teacher, layers, weight)


def _name_of(augment: Augment | None) -> str | None:
    """A function's name: how it prints may differ from process to process."""
    if augment is None or is_dataclass(augment):
        return None if augment is None else repr(augment)
    if isinstance(augment, partial):
        return f"{_name_of(augment.func)} with {augment.args} {sorted(augment.keywords.items())}"
    kind = augment if hasattr(augment, "__qualname__") else type(augment)
    return f"{kind.__module__}.{kind.__qualname__}"


def _digests(model: nn.Module, original: nn.Module | None, split: Split) -> dict[str, Any]:
    """What another run or process must have in common with this one. Costs a copy of the data to the host."""
    return {
        "network": digest_of_model(model),
        "original": None if original is None else digest_of_model(original),
        "data": split.examples.digest(),
        "validation": None if split.held is split.examples else split.held.digest(),
    }
