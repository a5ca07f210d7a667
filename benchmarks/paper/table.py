"""What the paper's tables are made of.

A table is a dictionary: ``heads`` and ``rows`` (text and numbers), ``claims`` (a sentence and whether it holds), and
``paper``, what the paper reports for its own networks.
"""

from __future__ import annotations

from typing import Any

from benchmarks.common.subjects import Score, Subject

Table = dict[str, Any]


def claim(sentence: str, holds: bool) -> dict[str, Any]:
    return {"claim": sentence, "holds": bool(holds)}


def figures(subject: Subject, score: Score) -> list[Any]:
    """Increase of the error in points, its 95 % interval (paired bootstrap), agreement in %, KL."""
    interval = f"{100 * score.low:.1f} to {100 * score.high:.1f}"
    return [subject.increase(score), interval, 100 * score.agreement, score.kl]


HEADS = ["error increase", "95 %", "agreement %", "KL"]
