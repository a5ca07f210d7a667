"""The networks and pictures the paper's experiments are repeated on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import leanconv
from benchmarks.common import cifar10, imagenet_networks
from benchmarks.common.augment import random_views
from benchmarks.common.vgg16_probe import read_pictures, vgg16_probe
from leanconv.evaluation.classification import accuracy, agreement, correct, logits_of
from leanconv.evaluation.paired import kl_divergence, paired_interval
from leanconv.train.augment import crop_and_flip

# VGG-16's thirteen convolutions, as the paper calls them.
NAMES = ("1_1", "1_2", "2_1", "2_2", "3_1", "3_2", "3_3", "4_1", "4_2", "4_3", "5_1", "5_2", "5_3")


@dataclass(frozen=True)
class Score:
    """Shares of the evaluation pictures; ``kl`` of the outputs from the original's; ``low``, ``high``: a 95 % interval
    of the increase of the error that is counted."""

    top1: float
    top5: float
    agreement: float
    kl: float
    low: float
    high: float


@dataclass
class Subject:
    """A trained network, pictures to calibrate and train with, and others to judge by."""

    name: str
    title: str
    model: nn.Module
    device: str
    calibration: list[Tensor]
    training: tuple[Tensor, Tensor]
    pictures: list[Tensor]
    labels: Tensor
    error: str  # the error that is counted: "top1" or "top5"
    speedups: tuple[float, ...]  # of the whole network
    layer_speedups: tuple[int, ...] = ()  # of a single layer
    group_speedups: tuple[int, ...] = ()  # of two or three layers
    tuning: dict[str, Any] = field(default_factory=dict)  # arguments of finetune, which distils from the original
    scratch: dict[str, Any] = field(default_factory=dict)  # of finetune for the same architecture from scratch
    supervised: dict[str, Any] = field(default_factory=dict)  # of finetune with labels, where there are enough
    runs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reference = logits_of(self.model, self.pictures, self.device)
        self.base = self.score(self.model)

    @property
    def layers(self) -> dict[str, str]:
        """conv1_1 ... -> the module's name."""
        found = [name for name, module in self.model.named_modules() if isinstance(module, nn.Conv2d)]
        return {f"conv{short}": name for short, name in zip(NAMES, found, strict=True)}

    def score(self, model: nn.Module) -> Score:
        return self.judged(model)[0]

    def judged(self, model: nn.Module) -> tuple[Score, Tensor]:
        """Its score, and which pictures it gets right (top-1 or top-5, as the error is counted)."""
        logits = logits_of(model, self.pictures, self.device)
        found = accuracy(logits, self.labels)
        column = 0 if self.error == "top1" else 1
        before, after = (correct(outputs, self.labels)[:, column] for outputs in (self.reference, logits))
        _, low, high = paired_interval(before, after)
        kl = kl_divergence(logits, self.reference)
        return Score(found.top1, found.top5, agreement(logits, self.reference), kl, low, high), after

    def increase(self, score: Score) -> float:
        """Increase of the error, in points."""
        return 100 * (getattr(self.base, self.error) - getattr(score, self.error))

    def accelerated(self, speedup: float = 4.0, **arguments: Any) -> tuple[leanconv.Accelerated, Score]:
        """As the paper does it, unless ``arguments`` say otherwise. Computed once for the same ones."""
        arguments = {"refine": "none", **arguments}
        key = json.dumps([speedup, arguments], sort_keys=True)
        if key not in self.runs:
            result = leanconv.accelerate(self.model, self.calibration, speedup, progress=False, **arguments)
            self.runs[key] = (result, self.score(result.model))
        found: tuple[leanconv.Accelerated, Score] = self.runs[key]
        return found

    def tuned(self, result: leanconv.Accelerated) -> leanconv.FineTuned:
        """Distilled from the original, without labels. Computed once for the same options."""
        key = json.dumps(["tuned", result.options.to_json()], sort_keys=True)
        if key not in self.runs:
            self.runs[key] = leanconv.finetune(
                result, self.training[0], self.model, progress=False, device=self.device, **self.tuning
            )
        found: leanconv.FineTuned = self.runs[key]
        return found


def imagenet(data: Path, device: str, limit: int | None, **named: Any) -> Subject:
    """A network with 1,000 pictures to calibrate with and 1,000 others to judge by."""
    classes = json.loads((data / "classes.json").read_text())
    calibration, own = read_pictures(data / "calib.tar", limit, classes)
    pictures, labels = read_pictures(data / "val.tar", limit, classes)
    images = torch.cat(calibration)
    return Subject(
        device=device,
        calibration=[batch.to(device) for batch in calibration],
        training=(images.to(device), own),
        pictures=[batch.to(device) for batch in pictures],
        labels=labels,
        **named,
    )


def vgg16_imagenet(data: Path, device: str, limit: int | None) -> Subject:
    """VGG-16's convolutions under a linear head."""
    return imagenet(
        data,
        device,
        limit,
        name="vgg16-imagenet",
        title="VGG-16 with a linear head, ImageNet pictures",
        model=vgg16_probe(data / "vgg16_probe.safetensors").to(device),
        error="top5",
        speedups=(3.0, 4.0, 5.0),
        layer_speedups=(2, 4, 8),
        group_speedups=(3, 5),
        # Adam for longer than by default. Chosen on a fifth of calib.tar, which accelerate had not seen.
        tuning={"epochs": 60, "optimizer": "adam", "holdout": 0.0, "augment": crop_and_flip(16, reflect=True)},
        scratch={
            "epochs": 20,
            "batch": 50,
            "lr": 1e-2,
            "schedule": "cosine",
            "warmup": 20,
            "clip": 1.0,
            "holdout": 0.0,
            "augment": random_views(0.6),
        },
    )


def vgg16_cifar10(data: Path, device: str, limit: int | None) -> Subject:
    """VGG-16 for 32 x 32 pictures, trained by cifar10.py; 3,000 training pictures to calibrate with."""
    (train, labels), (test, test_labels) = cifar10.read(data)
    test, test_labels = test[:limit], test_labels[:limit]
    return Subject(
        name="vgg16-cifar10",
        title="VGG-16, CIFAR-10",
        model=cifar10.load(data / "vgg16.safetensors").to(device),
        device=device,
        calibration=[part.to(device) for part in train[: limit or 3000].split(500)],
        training=(train[: limit and 10 * limit].to(device), labels[: limit and 10 * limit]),
        pictures=[part.to(device) for part in test.split(1000)],
        labels=test_labels,
        error="top1",
        speedups=(2.0, 4.0, 6.0),
        layer_speedups=(4, 8, 16),
        group_speedups=(4, 8),
        # The rate is that of refine="distill" for batches of 256; the epochs are what there was time for. Neither was
        # chosen by measuring.
        tuning={
            "epochs": 15,
            "batch": 256,
            "lr": 4.5e-3,
            "warmup": 100,
            "ema": 0.999,
            "holdout": 0.0,
            "augment": crop_and_flip(2, reflect=True),
        },
        scratch={
            "epochs": 20,
            "batch": 512,
            "lr": 0.05,
            "schedule": "cosine",
            "warmup": 200,
            "weight_decay": 5e-4,
            "holdout": 0.0,
            "clip": 1.0,
            "augment": crop_and_flip(4),
        },
        # Not SGD with the network's first rates: its batch norms are in the factors now, and 0.01 is too much already.
        supervised={
            "epochs": 20,
            "batch": 256,
            "lr": 3e-4,
            "optimizer": "adam",
            "schedule": "cosine",
            "warmup": 100,
            "clip": 1.0,
            "ema": 0.999,
            "holdout": 0.0,
            "augment": crop_and_flip(4),
        },
    )


def resnet20_cifar10(data: Path, device: str, limit: int | None) -> Subject:
    """ResNet-20, trained by cifar10.py, with the pictures of vgg16_cifar10; for experiments that train nothing."""
    (train, labels), (test, test_labels) = cifar10.read(data)
    test, test_labels = test[:limit], test_labels[:limit]
    return Subject(
        name="resnet20-cifar10",
        title="ResNet-20, CIFAR-10",
        model=cifar10.load(data / "resnet20.safetensors", "resnet20").to(device),
        device=device,
        calibration=[part.to(device) for part in train[: limit or 3000].split(500)],
        training=(train[: limit and 10 * limit], labels[: limit and 10 * limit]),
        pictures=[part.to(device) for part in test.split(1000)],
        labels=test_labels,
        error="top1",
        speedups=(2.0, 3.0),
    )


def resnet50_imagenet(data: Path, device: str, limit: int | None) -> Subject:
    """For experiments that train nothing."""
    return imagenet(
        data,
        device,
        limit,
        name="resnet50-imagenet",
        title="ResNet-50, ImageNet pictures",
        model=imagenet_networks.load("resnet50", data).to(device),
        error="top1",
        speedups=(1.42, 1.94, 2.39),
    )


def efficientnet_lite0_imagenet(data: Path, device: str, limit: int | None) -> Subject:
    """For experiments that train nothing."""
    return imagenet(
        data,
        device,
        limit,
        name="efficientnet-lite0-imagenet",
        title="EfficientNet-lite0, ImageNet pictures",
        model=imagenet_networks.load("efficientnet_lite0", data).to(device),
        error="top1",
        speedups=(1.2, 1.3),
    )


# For the paper's experiments.
SUBJECTS: dict[str, Callable[[Path, str, int | None], Subject]] = {
    "vgg16-imagenet": vgg16_imagenet,
    "vgg16-cifar10": vgg16_cifar10,
}
# For experiments that train nothing.
NETWORKS = {
    **SUBJECTS,
    "resnet20-cifar10": resnet20_cifar10,
    "resnet50-imagenet": resnet50_imagenet,
    "efficientnet-lite0-imagenet": efficientnet_lite0_imagenet,
}


def held_out(subject: Subject) -> Subject:
    """The same network on calibration pictures alone, the original's answers for labels."""
    images = torch.cat(subject.calibration)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1)).to(images.device)
    first = len(images) * 4 // 5
    subject.calibration = list(images[order[:first]].split(50))
    subject.pictures = list(images[order[first:]].split(50))
    with torch.inference_mode():
        subject.labels = torch.cat([subject.model(part).argmax(1).cpu() for part in subject.pictures])
    subject.__post_init__()
    return subject


def original_of(subject: Subject) -> dict[str, Any]:
    return {"top1": 100 * subject.base.top1, "top5": 100 * subject.base.top5, "error": subject.error}


def refuse_another_network(subject: Subject, known: Iterable[dict[str, Any]]) -> None:
    """Stop where ``known`` cells are of other weights: a network that was trained again is another network."""
    mine = original_of(subject)
    theirs = [one["original"] for one in known if one["model"] == subject.name and one["original"] != mine]
    if theirs:
        raise SystemExit(
            f"{subject.name} has a top-1 of {mine['top1']:.2f} % and a top-5 of {mine['top5']:.2f} %, that of known "
            f"cells {theirs[0]['top1']:.2f} and {theirs[0]['top5']:.2f}: it is another network; give the weights the "
            "cells were made with, or another --work and no --known."
        )
