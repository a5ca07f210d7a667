"""How a run went: one row for every check, and the result in a sentence."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from leanconv.system.text_table import table

# The rate was too large if the network lost more than this share of its right answers, and more images than by chance:
# at least FEW, and three standard deviations of a count.
COLLAPSE, FEW = 0.5, 10


@dataclass(frozen=True)
class Row:
    """``loss``: the mean since the row before, None in the first. ``held_loss``, ``held_right``: of the images held
    out, None without any."""

    step: int
    epoch: float
    lr: float
    loss: float | None
    held_loss: float | None
    held_right: float | None

    def cells(self, epochs: int) -> list[str]:
        return [
            f"{self.epoch:.1f}/{epochs}",
            str(self.step),
            f"{self.lr:.2e}",
            "" if self.loss is None else f"{self.loss:.4f}",
            "" if self.held_loss is None else f"{self.held_loss:.4f}",
            "" if self.held_right is None else f"{100 * self.held_right:.2f} %",
        ]


@dataclass
class History:
    """``right``: what the share of right answers is called. ``best``: the step whose weights were kept. ``stopped``:
    why the run ended early, in a sentence."""

    epochs: int
    right: str
    rows: list[Row] = field(default_factory=list)
    best: int = 0
    stopped: str | None = None
    unreadable: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def heads(self) -> list[str]:
        return ["epoch", "step", "lr", "loss", "held-out loss", f"held-out {self.right}"]

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def kept(self) -> Row:
        return next(row for row in self.rows if row.step == self.best)

    def add(self, row: Row) -> bool:
        """Whether this row is the best so far. Without images held out the last one is."""
        best = not self.rows or row.held_loss is None or self._order(row) > self._order(self.kept)
        self.rows.append(row)
        if best:
            self.best = row.step
        return best

    def _order(self, row: Row) -> tuple[float, float]:
        """Larger is better. With labels by the share of right answers, then by the loss; to distill by the loss."""
        loss = math.inf if row.held_loss is None else row.held_loss
        return (row.held_right or 0.0) if self.right == "top-1" else 0.0, -loss

    def reason_to_stop(self, count: int, lr: float, patience: int) -> str | None:
        """A sentence, from what was measured on ``count`` images held out; None: go on. ``patience``: how many checks
        may bring nothing better; 0: any number."""
        now = self.rows[-1]
        if now.held_loss is None or self.first.held_loss is None:
            return None
        before, after = self.first.held_right or 0.0, now.held_right or 0.0
        lost = (before - after) * count
        if after < COLLAPSE * before and lost >= max(FEW, 3 * math.sqrt(before * count)):
            return (
                f"held-out {self.right} collapsed from {100 * before:.2f} % to {100 * after:.2f} % by step {now.step}: "
                f"lr={lr:g} is too large; training stopped, the best weights are kept. Try a tenth of it."
            )
        since = sum(1 for row in self.rows if row.step > self.best)
        if patience and since >= patience:
            return f"no better for {since} checks; training stopped at step {now.step}."
        return None

    def verdict(self) -> str:
        """The result in one sentence."""
        kept = f"the weights of step {self.best} were kept" if self.best else "its weights stay as they were given"
        if self.first.held_loss is None:
            return f"nothing was held out, so whether the network got better is not known; {kept}."
        if self.best:
            return f"{self._change(self.kept)}; {kept}."
        end = f" ({self._change(self.rows[-1])} at the end)" if len(self.rows) > 1 else ""
        return f"training made the network no better{end}; {kept}."

    def _change(self, row: Row) -> str:
        """From the first row to this one; the figure by which rows are compared comes first."""
        first = self.first
        parts = [f"loss {first.held_loss:.4f} -> {row.held_loss:.4f}"]
        if first.held_right is not None and row.held_right is not None:
            parts.append(f"{self.right} {100 * first.held_right:.2f} % -> {100 * row.held_right:.2f} %")
        return f"held-out {', '.join(reversed(parts) if self.right == 'top-1' else parts)}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> History:
        return cls(**{**data, "rows": [Row(**row) for row in data["rows"]]})

    def table(self) -> str:
        return table(self.heads, [row.cells(self.epochs) for row in self.rows], left=0)

    def __str__(self) -> str:
        return "\n".join([self.table(), *([self.stopped] if self.stopped else []), self.verdict()])
