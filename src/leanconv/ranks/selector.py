"""How ranks are chosen: the protocol of a selector, what it is given, and the selectors by name.

``ranks=`` takes a name of SELECTORS, a selector, or a function ``merit(candidate, choice)`` whose sum over all layers
is to be largest.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from leanconv.calibrate.gradients import Gradients
from leanconv.calibrate.streams import Streams
from leanconv.errors import LeanconvError, listing
from leanconv.forms import Choices, Scheme
from leanconv.forms.replace import Change
from leanconv.network.sites import Site
from leanconv.ranks.candidates import Candidate
from leanconv.ranks.merging import Pairs, Problem
from leanconv.ranks.select import Merit, Search, log_energy
from leanconv.ranks.spectra import Spectra
from leanconv.runtimes.target import Measured


class Notes(Protocol):
    """What was measured, kept for a later choice or a later process."""

    def read(self, name: str) -> dict[str, Any]: ...

    def write(self, name: str, data: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Request:
    """What ranks are to be chosen for."""

    streams: Streams
    spectra: Spectra
    sites: Mapping[str, Site]
    pairs: Pairs  # of layers that may be merged
    fixed: int  # MACs of the layers that count but are no candidates
    speedup: float
    scheme: Scheme
    refits: bool  # whether layers will be fitted to the inputs they will have
    sees: bool  # whether filters will be split for what their layers see
    arguments: dict[str, Any]  # all of the run: a choice that differs from time to time is kept with these
    notes: Notes
    gradients: Callable[[], Mapping[str, Gradients]]  # of the output at every layer; LeanconvError where there are none
    changes: Callable[[Choices], list[Change]]  # what choices do to the layers, those that only take in a factor too

    @property
    def candidates(self) -> list[Candidate]:
        return list(self.spectra.candidates.values())

    def search(self, search: Search, merit: Merit = log_energy) -> tuple[Choices, Pairs]:
        with self.streams.clock.stage("choosing ranks"), self.streams.reporter.stage("choosing ranks", 0):
            candidates = tuple(self.candidates)
            problem = Problem(scheme=self.scheme, candidates=candidates, pairs=self.pairs, fixed=self.fixed)
            return problem.select(self.speedup, search, merit)


class RankSelector(Protocol):
    @property
    def name(self) -> str: ...

    def prepared(self, model: nn.Module, sample: Any, *, comparable: bool) -> RankSelector:
        """Itself, with what was left open filled in from the model. Refuses in one sentence what cannot be chosen for,
        before long work. ``sample``: two images. ``comparable``: whether the network returns floating-point tensors."""
        ...

    def choose(self, request: Request) -> tuple[Choices, Pairs]:
        """The form and ranks of every layer, and the pairs of layers to merge."""
        ...

    def final_times(self, streams: Streams) -> Measured | None:
        """Of both networks at the end of a run; None where nothing is timed."""
        ...


@dataclass(frozen=True)
class Energy:
    """The largest product of the energies kept."""

    name = "energy"

    def prepared(self, model: nn.Module, sample: Any, *, comparable: bool) -> RankSelector:
        return self

    def final_times(self, streams: Streams) -> Measured | None:
        return None

    def choose(self, request: Request) -> tuple[Choices, Pairs]:
        return request.search("greedy")


@dataclass(frozen=True)
class Uniform(Energy):
    """The same speed-up for every layer."""

    name = "uniform"

    def choose(self, request: Request) -> tuple[Choices, Pairs]:
        return request.search("uniform")


@dataclass(frozen=True)
class LargestMerit(Energy):
    """The largest sum of a function of (candidate, choice or None for dense)."""

    merit: Merit

    @property
    def name(self) -> str:  # type: ignore[override]
        return getattr(self.merit, "__name__", type(self.merit).__name__)

    def choose(self, request: Request) -> tuple[Choices, Pairs]:
        return request.search("forms", self.merit)


@dataclass(frozen=True)
class SelectorOfUser(Energy):
    """One that a saved result names and that is not there any more."""

    named: str

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.named

    def choose(self, request: Request) -> tuple[Choices, Pairs]:
        raise LeanconvError(f"ranks={self.named!r} was a selector of yours; give it again as an object.")


# A selector by its name: module and class, imported when it is asked for.
SELECTORS = {
    "auto": "leanconv.ranks.sensitivity.selector:Auto",
    "uniform": "leanconv.ranks.selector:Uniform",
    "energy": "leanconv.ranks.selector:Energy",
    "sensitivity": "leanconv.ranks.sensitivity.selector:Sensitivity",
    "latency": "leanconv.ranks.latency.selector:Latency",
}


def selector_of(value: Any, **options: Any) -> RankSelector:
    """From what ``ranks=`` takes; ``options``: of a selector given by its name."""
    if isinstance(value, str) and value in SELECTORS:
        module, _, name = SELECTORS[value].partition(":")
        return getattr(importlib.import_module(module), name)(**options)  # type: ignore[no-any-return]
    if hasattr(value, "choose") and hasattr(value, "name"):
        return value  # type: ignore[no-any-return]
    if callable(value):
        return LargestMerit(value)
    words = listing([repr(name) for name in SELECTORS])
    raise LeanconvError(
        f"ranks={value!r} is not known; use {words} or a dict {{'layer': rank}}, a selector such as "
        "leanconv.Latency(ms=20) or a function of (candidate, choice)."
    )
