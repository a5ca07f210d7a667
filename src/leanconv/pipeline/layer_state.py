"""One record a layer: what is known of it, from the choice of its form to the weights in its place."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from leanconv.calibrate.probes import Probe
from leanconv.forms import MERGED, Choice
from leanconv.forms.fit import Outcome, split_probe
from leanconv.forms.replace import Change, change_of
from leanconv.network.sites import Site
from leanconv.progress import Solved
from leanconv.result import LayerReport
from leanconv.solve import TwoStep


@dataclass
class LayerState:
    """A layer that is replaced, or, without a ``choice``, one that only takes in a factor of the layer before it.

    ``dense``: a probe of its own filters. ``probe``: of those it is fitted with, which may be a product of two.
    """

    site: Site
    dense: Probe
    choice: Choice | None
    macs: int
    energy: float = 1.0
    probe: Probe = None  # type: ignore[assignment]  # dense, unless the filters are split
    change: Change = None  # type: ignore[assignment]
    outcome: Outcome | None = None

    def __post_init__(self) -> None:
        self.probe = self.dense
        # A layer that stays whole keeps its batch norm where it is.
        whole = Change(name=self.name, form=MERGED, ranks=(), geometry=self.site.geometry)
        self.change = whole if self.choice is None else change_of(self.site, self.choice)

    @property
    def name(self) -> str:
        return self.site.name

    def split_into(self, split: TwoStep, *, free: bool) -> None:
        self.probe = split_probe(self.dense, split, free=free)

    def report(self, taken: tuple[int, ...]) -> LayerReport:
        """For the result. ``taken``: the d' that a layer which stays whole has taken in."""
        assert self.outcome is not None
        return LayerReport(
            name=self.name,
            scheme=self.change.form.name,
            ranks=taken if self.choice is None else self.choice.ranks,
            macs_before=self.site.cost.dense,
            macs_after=self.macs,
            energy=self.energy,
            **asdict(self.outcome),
        )

    def described(self, error: float | None) -> Solved:
        """One line of progress."""
        if self.choice is None:
            return Solved(self.name, "whole", (), error)
        return Solved(self.name, self.choice.form.name, self.choice.ranks, error)
