"""The ranks at other speed-ups, which the slider of a page shows."""

from __future__ import annotations

from typing import NamedTuple

from leanconv.errors import LeanconvError
from leanconv.forms import MERGED
from leanconv.ranks import KeptSpectra
from leanconv.ranks.merging import macs_after
from leanconv.report.facts import form_label

SMALLEST = 1.2
# The slider ends here, or at three times the speed-up of the run, or at the largest there is.
LARGEST = 8.0
MOST, LEAST = 40, 8  # plans
# A plan takes about 4 ms a layer; with this many layers in all plans together a page takes a few seconds.
LAYERS = 800


class PlannedLayer(NamedTuple):
    label: str  # form and ranks
    macs: int
    energy: float


class Plan(NamedTuple):
    """``layers`` are in the order of the candidates."""

    speedup: float  # the target
    before: int  # MACs of the whole network
    after: int
    replaced: int  # layers that have factors
    layers: list[PlannedLayer]


def speedups(kept: KeptSpectra, target: float) -> list[float]:
    """In equal ratios, each rounded to a twentieth, with the ``target`` of the run among them."""
    end = min(kept.reachable, max(LARGEST, 3 * target))
    start = min(SMALLEST, end)
    count = max(LEAST, min(MOST, LAYERS // max(1, len(kept.candidates))))
    steps = (start * (end / start) ** (step / (count - 1)) for step in range(count))
    rounded = {int(20 * step + 1e-9) / 20 for step in steps}
    return sorted({speedup for speedup in (*rounded, target) if speedup > 1})


def plans(kept: KeptSpectra, target: float) -> list[Plan]:
    """What ``ranks="energy"`` gives for each speed-up that can be reached."""
    by_name = {one.name: one for one in kept.candidates}
    before = kept.fixed + sum(one.cost.dense for one in kept.candidates)
    made = []
    for speedup in speedups(kept, target):
        try:
            plan, pairs = kept.select(speedup)
        except LeanconvError:  # the ranks are too coarse for it
            continue
        macs = macs_after(by_name, plan, pairs)
        labels = dict.fromkeys(by_name, form_label(None, ()))
        labels |= {taker: form_label(MERGED.name, plan[giver].ranks[-1:]) for giver, taker in pairs}
        labels |= {name: form_label(choice.form.name, choice.ranks) for name, choice in plan.items()}
        energies = dict.fromkeys(by_name, 1.0) | {name: by_name[name].energy(choice) for name, choice in plan.items()}
        layers = [PlannedLayer(labels[name], macs[name], energies[name]) for name in by_name]
        made.append(Plan(speedup, before, kept.fixed + sum(macs.values()), len(plan), layers))
    return made
