"""Training an accelerated network: with labels, or without, from the original."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from leanconv._version import __version__
from leanconv.calibrate.processes import Team
from leanconv.errors import LeanconvError, listing, whole
from leanconv.network.user_model import check_model, copied, device_of, parse_device, untouched_rng
from leanconv.progress import reporter
from leanconv.result import Accelerated
from leanconv.storage.workdir import digest_of_model
from leanconv.system.precision import chosen_kernels
from leanconv.train.augment import PictureSet
from leanconv.train.checkpoint import Checkpoint
from leanconv.train.dataset import Augment, Examples
from leanconv.train.feature_points import places_of
from leanconv.train.history import History
from leanconv.train.loop import Loop
from leanconv.train.objectives import Distillation, Goal, Supervised
from leanconv.train.settings import Optimizer, Precision, Schedule, Settings, number


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
    check_every: int = 0,
    patience: int = 0,
    checkpoint_every: int = 200,
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
            draws is fixed by ``seed`` (``leanconv.train.augment`` has some).
        epochs: default 5; with ``original`` 30.
        batch: images a step, of each process. Default 128; with ``original`` 50.
        lr: default 1e-5, as the paper has it: a larger rate forgets what the network knows. With ``original``
            3e-4. Of "muon" 2e-3: the share of its size by which a layer changes in a step.
        optimizer: "sgd" (momentum 0.9), "adam", or "muon": momentum made orthogonal, so that the directions in which a
            layer's input varies little are learnt too. Default "sgd"; with ``original`` "muon".
        weight_decay: that of the optimizer.
        schedule: "constant", or "cosine" to zero. Default "constant"; with ``original`` "cosine".
        warmup: steps of a rising rate before. Default 0; with ``original`` 20.
        ema: an average of the weights with this decay is what is judged and kept; 0 is off. Default 0; with
            ``original`` 0.99.
        clip: largest norm of a gradient; 0 is off.
        precision: "auto" is bfloat16 where there is a GPU, or "off", "bf16", "fp16".
        features: with ``original``: of how many replaced layers the responses are matched; default all.
        outputs: with ``original``: weight of the outputs' divergence beside them; default 0, or 1 where there are no
            responses to match.
        holdout: share of ``data`` that is not trained on; 0: none, and the last weights are kept.
        check_every: judge every so many steps (0: once an epoch).
        patience: stop after so many checks without a better one (0: never).
        checkpoint_every: write the state into ``workdir`` every so many steps.
        workdir: a folder for the state of the run. A run that was killed goes on from there when it is called again
            with the same arguments, and ends in the same weights.
        seed: of the split, the order of the images and all that is drawn.

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
    settings = Settings.check(
        distill=original is not None,
        epochs=epochs,
        batch=batch,
        lr=lr,
        optimizer=optimizer,
        weight_decay=weight_decay,
        schedule=schedule,
        warmup=warmup,
        ema=ema,
        clip=clip,
        precision=precision,
        holdout=holdout,
        check_every=check_every,
        patience=patience,
        checkpoint_every=checkpoint_every,
        seed=seed,
    )
    hands = whole("workers", workers, 0)
    place = device_of(model) if device is None else parse_device(device)
    team = Team(place)
    with untouched_rng(settings.seed), torch.inference_mode(False), torch.enable_grad(), team.ending_all():
        examples = Examples(data, original is None, augment, hands)
        held = examples if validation is None else Examples(validation, original is None, None, hands)
        training, held_out = _split(examples, held, settings, team.world)
        trained = _trainable(model, place)
        goal = _goal(network, original, place, features, outputs)
        arguments = {
            **asdict(settings),
            "features": features,
            "outputs": outputs,
            "augment": _named(augment),
            **(_digests(model, original, examples, held) if workdir is not None or team.world > 1 else {}),
            "processes": team.world,
            "leanconv": __version__,
            "torch": str(torch.__version__),
        }
        team.same("arguments", arguments)
        steps = settings.epochs * Examples.steps(training, settings.batch * team.world)
        title = "fine-tuning" if original is None else "distilling"
        with (
            _opened(workdir if team.lead else None) as checkpoint,
            reporter(progress and team.lead).stage(title, steps) as stage,
        ):
            loop = Loop(
                model=trained,
                goal=goal,
                examples=examples,
                training=training,
                held=held,
                held_out=held_out,
                settings=settings,
                device=place,
                team=team,
                stage=stage,
                checkpoint=checkpoint,
                arguments=arguments,
            )
            with _tried_kernels():
                history = loop.run()
    _as_given(trained, model)
    summary = {"history": history.to_json(), "settings": asdict(settings), "distilled": original is not None}
    result = replace(network, model=trained, training=summary) if isinstance(network, Accelerated) else None
    return FineTuned(trained, history, result)


@contextmanager
def _opened(workdir: str | os.PathLike[str] | None) -> Iterator[Checkpoint | None]:
    checkpoint = None if workdir is None else Checkpoint(workdir)
    try:
        yield checkpoint
    finally:
        if checkpoint is not None:
            checkpoint.close()


def _tried_kernels() -> AbstractContextManager[None]:
    """cuDNN tries its kernels on the first batch: the same shapes come thousands of times. Not for who asked for the
    same bits every time."""
    now = torch.backends.cudnn
    return chosen_kernels(benchmark=now.benchmark or not now.deterministic, deterministic=now.deterministic)


def _as_given(trained: nn.Module, model: nn.Module) -> None:
    """Every tensor in the dtype, on the device and in the layout of the one it was copied from."""
    for mine, given in zip(
        (*trained.parameters(), *trained.buffers()), (*model.parameters(), *model.buffers()), strict=True
    ):
        mine.data = torch.empty_like(given).copy_(mine.data)
        mine.grad = None
        mine.requires_grad_(given.requires_grad)


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
    network: Accelerated | nn.Module,
    original: nn.Module | None,
    device: torch.device,
    features: int | None,
    outputs: float | None,
) -> Goal:
    if original is None:
        for name, value in (("features", features), ("outputs", outputs)):
            if value is not None:
                raise LeanconvError(f"{name} goes with original, the network to learn from, which is not given.")
        return Supervised()
    check_model(original)
    places = places_of(network.changes, features) if isinstance(network, Accelerated) else []
    weight = number("outputs", float(not places) if outputs is None else outputs, least=0.0)
    if not places and not weight:
        raise LeanconvError("with outputs=0 and no layer's responses to match there is nothing to train for.")
    missing = [place for place in places if place not in dict(original.named_modules())]
    if missing:
        raise LeanconvError(
            f"original has no layer {listing(missing, 2)}; give the network that was accelerated, or features=0."
        )
    teacher = _single(copied(original).to(device)).eval().requires_grad_(False)
    return Distillation(teacher, places, weight)


def _split(examples: Examples, held: Examples, settings: Settings, world: int) -> tuple[list[int], list[int]]:
    """Indices, in order, of the images to train on and of those held out."""
    count = len(examples)
    if count == 0 or len(held) == 0:
        raise LeanconvError(f"the {'validation ' if count else ''}data is empty; give images to train on.")
    if count < world:
        raise LeanconvError(
            f"there are {count} images for {world} processes; give each at least one, or fewer processes."
        )
    if held is not examples:
        return list(range(count)), list(range(len(held)))
    out = round(settings.holdout * count)
    if (settings.holdout and out == 0) or count - out < world:
        part = "none to hold out" if out == 0 else "too few to train on"
        raise LeanconvError(
            f"holdout={settings.holdout:g} of {count} images leaves {part}; give more images, another holdout (0 holds "
            "out none), or validation images."
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(settings.seed)).tolist()
    return sorted(order[out:]), sorted(order[:out])


def _named(augment: Augment | None) -> str | None:
    """A function by its name: how it prints may differ from process to process."""
    if augment is None or is_dataclass(augment):
        return None if augment is None else repr(augment)
    if isinstance(augment, partial):
        return f"{_named(augment.func)} with {augment.args} {sorted(augment.keywords.items())}"
    kind = augment if hasattr(augment, "__qualname__") else type(augment)
    return f"{kind.__module__}.{kind.__qualname__}"


def _digests(model: nn.Module, original: nn.Module | None, examples: Examples, held: Examples) -> dict[str, Any]:
    """What another run or process must have in common with this one. Costs a copy of the data to the host."""
    return {
        "network": digest_of_model(model),
        "original": None if original is None else digest_of_model(original),
        "data": _digest(examples),
        "validation": None if held is examples else _digest(held),
    }


def _digest(examples: Examples) -> str:
    """Of tensors their numbers, of pictures their names and what is made of them, of other datasets the length."""
    total = hashlib.sha256(str(len(examples)).encode())
    for tensor in examples.tensors:
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    if isinstance(examples.data, PictureSet):
        for picture in examples.data.pictures:
            total.update(f"{picture.name} {picture.label} ".encode())
        total.update(repr((examples.data.preprocess, examples.data.classes, examples.data.smallest)).encode())
    return total.hexdigest()
