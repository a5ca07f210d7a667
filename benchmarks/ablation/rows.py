"""What the ablation measures: the ways of accelerate, and the speed-ups of each network."""

from __future__ import annotations

from typing import Any

from leanconv import ThreeD

# Arguments of accelerate. First what the paper does, then each step alone, then added one by one. refine="closed-form"
# is two steps; a row "without" one of them shows the other. "images": all the training set's, not 3,000 of them.
SAMPLES, CLOSED, RANKS = {"samples": 150_000}, {"refine": "closed-form"}, {"ranks": "sensitivity"}
SWEEPS, DISTILLED = {"scheme": ThreeD(sweeps=3)}, {"refine": "distill"}
# What accelerate does by default, and without one of its steps.
DEFAULT = {**CLOSED, "ranks": "auto"}
PAPER = "the paper's 3d"
ROWS: dict[str, dict[str, Any]] = {
    PAPER: {},
    "three times the samples": SAMPLES,
    "fitted for images not seen": CLOSED | {"without": "free filters"},
    "horizontal filters fitted freely": CLOSED | {"without": "images held out"},
    "ranks by sensitivity": RANKS,
    "both halves of splits fitted": SWEEPS,
    "closed form (both)": CLOSED,
    "closed form, both halves": CLOSED | SWEEPS,
    "samples, closed form": SAMPLES | CLOSED,
    "samples, closed form, sensitivity": SAMPLES | CLOSED | RANKS,
    "samples, closed form, sensitivity, both halves": SAMPLES | CLOSED | RANKS | SWEEPS,
    "distilled": DISTILLED,
    "samples, sensitivity, distilled": SAMPLES | RANKS | DISTILLED,
    "the last, all training pictures": SAMPLES | RANKS | DISTILLED | {"images": "all"},
    "samples, sensitivity, both halves, distilled": SAMPLES | RANKS | DISTILLED | SWEEPS,
    "the default": DEFAULT,
    "the default, ranks by energy": CLOSED,
    "the default, splits and what they lose by filters alone": DEFAULT | {"without": "splits as seen"},
    "the default, no metric of the output": DEFAULT | {"without": "the metric"},
    "the default, samples": DEFAULT | SAMPLES,
    "the default, distilled": DEFAULT | DISTILLED,
}
# The ways a user chooses between, as the README has them.
SUMMARY = {
    PAPER: PAPER,
    "closed form (both)": "closed form, ranks by energy",
    "samples, closed form, sensitivity": '`ranks="sensitivity"`, `samples=150_000`',
    "samples, sensitivity, distilled": 'and `refine="distill"`',
}
SPEEDUPS = {
    "vgg16-imagenet": (3.0, 4.0, 5.0),
    "resnet50-imagenet": (1.42, 1.94, 2.39),
    "efficientnet-lite0-imagenet": (1.2, 1.3),
    "vgg16-cifar10": (4.0, 6.0),
    "resnet20-cifar10": (2.0, 3.0),
}
