"""The ranks at other speed-ups, which the slider of a page shows."""

from __future__ import annotations

from typing import Any

from leanconv.errors import LeanconvError
from leanconv.ranks import KeptSpectra
from leanconv.ranks.merging import macs_after
from leanconv.report.facts import form_label

SMALLEST = 1.2
# The slider ends here, or at three times the speed-up of the run, or at the largest there is.
LARGEST = 8.0
MOST, LEAST = 40, 8  # plans
# A plan takes about 4 ms a layer; with this many layers in all plans together a page takes a few seconds.
LAYERS = 800


def speedups(kept: KeptSpectra, target: float) -> list[float]:
    """In equal ratios, each rounded to a twentieth, with the ``target`` of the run among them."""
    end = min(kept.reachable, max(LARGEST, 3 * target))
    start = min(SMALLEST, end)
    count = max(LEAST, min(MOST, LAYERS // max(1, len(kept.candidates))))
    steps = (start * (end / start) ** (step / (count - 1)) for step in range(count))
    rounded = {int(20 * step + 1e-9) / 20 for step in steps}
    return sorted({speedup for speedup in (*rounded, target) if speedup > 1})


def plans(kept: KeptSpectra, target: float) -> list[dict[str, Any]]:
    """What ``ranks="energy"`` gives for each speed-up that can be met. ``layers``: form, MACs and energy of each
    candidate; ``replaced``: how many have factors."""
    by_name = {one.name: one for one in kept.candidates}
    before = kept.fixed + sum(one.cost.dense for one in kept.candidates)
    made: list[dict[str, Any]] = []
    for speedup in speedups(kept, target):
        try:
            plan, pairs = kept.select(speedup)
        except LeanconvError:  # the ranks are too coarse for it
            continue
        macs = macs_after(by_name, plan, pairs)
        givers = {taker: giver for giver, taker in pairs}
        layers = []
        for name, candidate in by_name.items():
            choice = plan.get(name)
            label = form_label(None, ())
            if choice is not None:
                label = form_label(choice.scheme, choice.ranks)
            elif name in givers:
                label = form_label("merged", plan[givers[name]].ranks[-1:])
            energy = 1.0 if choice is None else candidate.energy(choice)
            layers.append([label, macs[name], round(energy, 5)])
        after = kept.fixed + sum(macs.values())
        made.append(
            {"speedup": speedup, "macs": after, "achieved": before / after, "replaced": len(plan), "layers": layers}
        )
    return made
