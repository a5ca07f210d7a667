"""The options of ``finetune``."""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass
from typing import Literal

from leanconv.errors import LeanconvError
from leanconv.system.fields import check_fields, option

Optimizer = Literal["sgd", "adam", "muon"]
Schedule = Literal["constant", "cosine"]
Precision = Literal["auto", "off", "bf16"]

# Option -> its default with labels and with an original. With labels it is the paper's: a larger rate forgets what the
# network knows. With an original it holds on to the goal of every layer, and can train for longer with larger steps.
DEFAULTS = {
    "optimizer": ("sgd", "muon"),
    "lr": (1e-5, 3e-4),
    "epochs": (5, 30),
    "batch": (128, 50),
    "schedule": ("constant", "cosine"),
    "warmup": (0, 20),
    "ema": (0.0, 0.99),
}
MUON_RATE = 2e-3  # muon's default lr, with labels or without: a share of the size of the weights
ORIGINAL_ONLY = ("features", "outputs")  # options that need the original


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Options of one run.

    ``distill``: whether the network learns from the original, without labels. The defaults depend on it: they replace
    None.
    """

    distill: InitVar[bool] = False
    epochs: int = option(None, "Passes over the images. Default: 5; to distill 30.", at_least=1)
    batch: int = option(None, "Images a step of a process. Default: 128; to distill 50.", at_least=1)
    lr: float = option(
        None,
        "Learning rate. Default: 1e-5; to distill 3e-4. Of muon 2e-3: the share of its size by which a layer "
        "changes in a step.",
        above=0,
    )
    optimizer: Optimizer = option(
        None,
        "sgd (momentum 0.9), adam (AdamW), or muon: momentum made orthogonal, so that the directions in which a "
        "layer's input varies little are learnt too. Default: sgd; to distill muon.",
    )
    weight_decay: float = option(0.0, "Weight decay of the optimizer.", at_least=0)
    schedule: Schedule = option(
        None, "How the rate falls: constant, or cosine to zero. Default: constant; to distill cosine."
    )
    warmup: int = option(
        None, "Steps over which the rate rises, half of all at most. Default: 0; to distill 20.", at_least=0
    )
    ema: float = option(
        None,
        "Decay of an average of the weights, which is then what is judged and kept; 0: off. Default: 0; to "
        "distill 0.99.",
        at_least=0,
        under=1,
    )
    clip: float = option(0.0, "Largest norm of a gradient; 0: off.", at_least=0)
    precision: Precision = option("auto", "auto (bf16 on a GPU), off or bf16.")
    features: int | None = option(
        None, "To distill: match the responses of so many replaced layers, evenly spread. Default: all.", at_least=0
    )
    outputs: float | None = option(
        None,
        "To distill: weight of the divergence of the outputs. Default: 0; 1 where there are no responses to match.",
        at_least=0,
    )
    holdout: float = option(
        0.1, "Share of the images that is not trained on; 0: none, and the last weights are kept.", at_least=0, under=1
    )
    patience: int = option(0, "Stop after so many epochs without a better network; 0: never.", at_least=0)
    seed: int = option(0, "Of the split, the order of the images and all that is drawn.", at_least=0)

    def __post_init__(self, distill: bool) -> None:
        for name, defaults in DEFAULTS.items():
            if getattr(self, name) is None:
                muon_rate = name == "lr" and self.optimizer == "muon"
                object.__setattr__(self, name, MUON_RATE if muon_rate else defaults[distill])
        check_fields(self)
        for name in () if distill else ORIGINAL_ONLY:
            if getattr(self, name) is not None:
                raise LeanconvError(f"{name} goes with original, the network to learn from, which is not given.")

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
        """The decay of the average after step ``step`` (from 0): small at first, so that it soon forgets the start."""
        return min(self.ema, (1 + step) / (10 + step))
