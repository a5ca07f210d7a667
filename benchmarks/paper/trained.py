"""The paper's experiments in which an accelerated network is trained: without labels, with them, and from scratch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import leanconv
from benchmarks.common.initialise import scratch
from benchmarks.common.subjects import Subject
from benchmarks.paper.table import HEADS, Table, claim, figures


def finetuned(subject: Subject) -> Table:
    """3d, and then distilled from the original, without labels."""
    return _before_and_after(subject, "fine-tuning (distilled, no labels)", subject.tuning, subject.tuned)


def past_the_paper(subject: Subject) -> Table:
    """The same with leanconv's own ranks and fit before it."""
    table = _before_and_after(
        subject,
        "fine-tuning (distilled, no labels)",
        subject.tuning,
        subject.tuned,
        ranks="sensitivity",
        samples=150_000,
        refine="closed-form",
    )
    return {**table, "title": f"Ranks by sensitivity, closed form: {table['title']}"}


def with_labels(subject: Subject) -> Table:
    """3d, and then fine-tuned with labels, as the paper does."""
    if not subject.supervised:
        raise SystemExit(f"{subject.name} has too few pictures with labels to train on; give --model vgg16-cifar10.")

    def tuned(result: leanconv.Accelerated) -> leanconv.FineTuned:
        return leanconv.finetune(result, subject.training, progress=False, device=subject.device, **subject.supervised)

    return _before_and_after(subject, "fine-tuning with labels", subject.supervised, tuned)


def _before_and_after(
    subject: Subject,
    what: str,
    settings: dict[str, Any],
    train: Callable[[leanconv.Accelerated], leanconv.FineTuned],
    **arguments: Any,
) -> Table:
    """3d at every speed-up, and what ``train`` makes of it. ``arguments``: of accelerate, beside the paper's."""
    rows, fewer, nearer = [], [], []
    for speedup in subject.speedups:
        result, before = subject.accelerated(speedup, scheme="3d", **arguments)
        started = time.perf_counter()
        tuned = train(result)
        seconds = time.perf_counter() - started
        after = subject.score(tuned.model)
        rows.append([f"{speedup:g}x", *figures(subject, before), *figures(subject, after), seconds])
        fewer.append(subject.increase(after) < subject.increase(before))
        nearer.append(after.agreement > before.agreement)
    return {
        "title": f"3d before and after {what}",
        "heads": ["speed-up", *(f"{when}: {head}" for when in ("before", "after") for head in HEADS), "seconds"],
        "rows": rows,
        "settings": {key: str(value) for key, value in settings.items()},
        # Errors are what the paper counts; where a speed-up loses nothing they are noise, and agreement says more.
        "claims": [
            claim("fine-tuned beats not fine-tuned at every speed-up", all(fewer)),
            claim("fine-tuned agrees with the original more often at every speed-up", all(nearer)),
        ],
        "paper": "VGG-16, 3d at 3x / 4x / 5x: 0.4 / 0.9 / 2.0; fine-tuned 0.0 / 0.3 / 1.0. SPP-10 at 4x: 1.6; 1.3.",
    }


def from_scratch(subject: Subject) -> Table:
    """The architecture 3d arrives at, trained from random weights."""
    result, before = subject.accelerated(4.0, scheme="3d")
    tuned = subject.score(subject.tuned(result).model)
    fresh = scratch(result.model)
    trained = leanconv.finetune(fresh, subject.training, progress=False, device=subject.device, **subject.scratch)
    after = subject.score(trained.model)
    rows = [
        ["accelerated", *figures(subject, before)],
        ["accelerated, fine-tuned", *figures(subject, tuned)],
        [f"from scratch, {subject.scratch['epochs']} epochs", *figures(subject, after)],
    ]
    return {
        "title": "4x 3d against the same architecture from scratch (He initialisation)",
        "heads": ["network", *HEADS],
        "rows": rows,
        "settings": {key: str(value) for key, value in subject.scratch.items()},
        "history": str(trained.history),
        "claims": [
            claim(
                "accelerated beats from scratch, fine-tuned or not",
                subject.increase(after) > max(subject.increase(before), subject.increase(tuned)),
            )
        ],
        "paper": "SPP-10 at 4x: 1.6 accelerated, 1.3 fine-tuned, 4.4 from scratch.",
    }


TABLES: dict[str, Callable[[Subject], Table]] = {
    "finetuned": finetuned,
    "past": past_the_paper,
    "labels": with_labels,
    "scratch": from_scratch,
}
