"""What ``finetune`` was asked to do, checked in one place."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, Literal

from leanconv.errors import LeanconvError, listing, whole

Optimizer = Literal["sgd", "adam", "muon"]
Schedule = Literal["constant", "cosine"]
Precision = Literal["auto", "off", "bf16", "fp16"]

OPTIMIZERS = ("sgd", "adam", "muon")
SCHEDULES = ("constant", "cosine")
PRECISIONS = ("auto", "off", "bf16", "fp16")

# epochs, batch, optimizer, schedule, warmup, ema
LABELS = (5, 128, "sgd", "constant", 0, 0.0)
DISTILLATION = (30, 50, "muon", "cosine", 20, 0.99)
LABELS_RATE, DISTILLATION_RATE = 1e-5, 3e-4
MUON_RATE = 2e-3  # of either: in parts of the weights


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of one run. With labels the defaults are the paper's: 1e-5, batches of 128, 5 epochs, plain SGD. Distillation can
    go on for longer and with larger steps: it has the goal of every layer to hold on to."""

    epochs: int
    batch: int  # images a step of one process
    lr: float
    optimizer: Optimizer
    weight_decay: float
    schedule: Schedule
    warmup: int  # steps over which the rate rises to lr, half of all at most
    ema: float  # decay of the average of the weights, 0 is off
    clip: float  # largest norm of a gradient, 0 is off
    precision: Precision
    holdout: float  # share of the data that is not trained on
    check_every: int  # steps, 0: once an epoch
    patience: int  # checks without a better score before it stops, 0: never
    checkpoint_every: int  # steps
    seed: int

    @classmethod
    def check(
        cls,
        *,
        distill: bool,
        epochs: Any,
        batch: Any,
        lr: Any,
        optimizer: Any,
        weight_decay: Any,
        schedule: Any,
        warmup: Any,
        ema: Any,
        clip: Any,
        precision: Any,
        holdout: Any,
        check_every: Any,
        patience: Any,
        checkpoint_every: Any,
        seed: Any,
    ) -> Settings:
        """None stands for the default: of ``distill`` or of training with labels."""
        defaults = DISTILLATION if distill else LABELS
        epochs, batch, optimizer, schedule, warmup, ema = (
            default if value is None else value
            for value, default in zip((epochs, batch, optimizer, schedule, warmup, ema), defaults, strict=True)
        )
        if lr is None:
            lr = MUON_RATE if optimizer == "muon" else DISTILLATION_RATE if distill else LABELS_RATE
        for name, value, allowed in (
            ("optimizer", optimizer, OPTIMIZERS),
            ("schedule", schedule, SCHEDULES),
            ("precision", precision, PRECISIONS),
        ):
            if not isinstance(value, str) or value not in allowed:
                words = listing([repr(word) for word in allowed])
                raise LeanconvError(f"{name}={value!r} is not known; use {words}.")
        return cls(
            epochs=whole("epochs", epochs, 1),
            batch=whole("batch", batch, 1),
            lr=number("lr", lr, above=0.0),
            optimizer=optimizer,
            weight_decay=number("weight_decay", weight_decay, least=0.0),
            schedule=schedule,
            warmup=whole("warmup", warmup, 0),
            ema=number("ema", ema, least=0.0, under=1.0),
            clip=number("clip", clip, least=0.0),
            precision=precision,
            holdout=number("holdout", holdout, least=0.0, under=1.0),
            check_every=whole("check_every", check_every, 0),
            patience=whole("patience", patience, 0),
            checkpoint_every=whole("checkpoint_every", checkpoint_every, 1),
            seed=whole("seed", seed, 0),
        )

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of step ``step`` (from 0) of ``steps``."""
        rising = min(self.warmup, steps // 2)
        if step < rising:
            return self.lr * (step + 1) / rising
        if self.schedule == "constant":
            return self.lr
        share = (step - rising) / max(1, steps - rising)
        return self.lr * 0.5 * (1 + math.cos(math.pi * share))

    def decay(self, step: int) -> float:
        """Of the average behind step ``step`` (from 0): short at first, so that it does not cling to the beginning."""
        return min(self.ema, (1 + step) / (10 + step))


def number(
    name: str, value: Any, *, least: float = -math.inf, above: float = -math.inf, under: float = math.inf
) -> float:
    good = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if not (good and least <= value < under and value > above):
        bounds = [f"at least {least:g}"] if least > -math.inf else []
        bounds += [f"above {above:g}"] if above > -math.inf else []
        bounds += [f"under {under:g}"] if under < math.inf else []
        raise LeanconvError(f"{name}={value!r} must be a number {' and '.join(bounds)}.")
    return float(value)
