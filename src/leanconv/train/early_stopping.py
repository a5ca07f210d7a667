"""When it is of no use to train on."""

from __future__ import annotations

import math

from leanconv.train.history import History

# A network that has lost more than this share of what it got right was trained with too large a rate; if that is more
# than chance does: FEW images at least, and three standard deviations of a count.
COLLAPSE, FEW = 0.5, 10


def of_no_use(history: History, count: int, lr: float, patience: int) -> str | None:
    """Why to stop, by what was measured on ``count`` images held out; None: go on. ``patience``: checks without a
    better one, 0 for ever."""
    rows, first = history.rows, history.first
    now = rows[-1]
    if now.held_loss is None or first.held_loss is None:
        return None
    before, after = first.held_right or 0.0, now.held_right or 0.0
    lost = (before - after) * count
    if after < COLLAPSE * before and lost >= max(FEW, 3 * math.sqrt(before * count)):
        return (
            f"held-out {history.right} collapsed from {100 * before:.2f} % to {100 * after:.2f} % by step {now.step}: "
            f"lr={lr:g} is too large; training stopped, the best weights are kept. Try a tenth of it."
        )
    since = sum(1 for row in rows if row.step > history.best)
    if patience and since >= patience:
        return f"no better for {since} checks; training stopped at step {now.step}."
    return None
