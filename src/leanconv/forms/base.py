"""What the rest of leanconv asks of a form: where it applies, its ranks and limits, cost, modules and spectra."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from leanconv.network.layers.geometry import Cost, Geometry
from leanconv.solve import FilterBasis, Metric, Moments, TwoStep

Ranks = tuple[int, ...]

# Ranks of one kind that a search tries at most; of pairs of ranks, unless there are few of them.
TRIED, TRIED_EACH, FEW_PAIRS = 512, 40, 4000


@dataclass(frozen=True)
class Axis:
    """What one rank of a form cuts. Its spectrum says how much energy a rank keeps."""

    name: str  # in saved files
    symbol: str  # of its rank, for people
    energy_of: str  # what its energies are of, for people
    limit: Callable[[Geometry], int]  # the largest useful rank
    # Decomposes filters (d x c x kernel); None: the spectrum is that of the responses to the images.
    basis: Callable[[Tensor], FilterBasis] | None = None
    # The same for what the layer sees: patches (n x (c k)), and a metric of its responses. None: it has no such basis.
    basis_as_seen: Callable[[Tensor, Tensor, Metric | None], FilterBasis | None] | None = None


RESPONSES = Axis("channel", "d'", "responses", lambda g: g.channel_limit)


class Form(ABC):
    """A way to replace a layer by thinner ones."""

    name: ClassVar[str]  # what is printed and saved
    about: ClassVar[str]  # one line for people
    axes: ClassVar[tuple[Axis, ...]]  # one a rank, in the order of the ranks; that of the responses last
    pointwise_end: ClassVar[bool]  # whether it ends in 1 x 1 filters, which the next layer may be able to take in

    @abstractmethod
    def applies(self, geometry: Geometry) -> bool: ...

    @abstractmethod
    def macs(self, cost: Cost, ranks: Ranks) -> int:
        """Multiply-accumulates of all factors."""

    @abstractmethod
    def first_macs(self, cost: Cost, ranks: Ranks) -> int:
        """Of the factor that sees the layer's input: they grow with its channels."""

    @abstractmethod
    def modules(self, geometry: Geometry, ranks: Ranks) -> dict[str, nn.Module | None]:
        """The factors by name, in order, weights not yet set; None is left out."""

    def limits(self, geometry: Geometry) -> Ranks:
        """The largest useful ranks."""
        return tuple(axis.limit(geometry) for axis in self.axes)

    def grid(self, geometry: Geometry) -> Iterable[Ranks]:
        """The ranks a search over forms tries: all where there are few, else an even selection."""
        limits = self.limits(geometry)
        several = len(limits) > 1 and math.prod(limits) > FEW_PAIRS
        return itertools.product(*(evenly(limit, TRIED_EACH if several else TRIED) for limit in limits))

    def rank_on(self, axis: Axis, geometry: Geometry, ranks: Ranks) -> int:
        """The rank on ``axis``, the full one where the form does not cut it."""
        return dict(zip(self.axes, ranks, strict=True)).get(axis, axis.limit(geometry))

    @property
    def split_axis(self) -> Axis | None:
        """The axis along which the filters are split in two before anything is fitted."""
        return next((axis for axis in self.axes if axis.basis is not None), None)

    @property
    def needs_patches(self) -> bool:
        """Whether ``improved`` wants to know what the layer sees."""
        return False

    def improved(self, split: TwoStep, weight: Tensor, patches: Moments) -> TwoStep:
        """A better split of the filters ``weight`` for a layer that sees ``patches`` (n x (c k))."""
        return split


@dataclass(frozen=True)
class Choice:
    """How one layer is replaced: a form and its ranks."""

    form: Form
    ranks: Ranks

    def __str__(self) -> str:
        return f"{self.form.name} {' x '.join(map(str, self.ranks))}"


# What each layer becomes. A layer without an entry stays dense.
Choices = dict[str, Choice]


def evenly(limit: int, most: int) -> list[int]:
    """Ranks 1 .. limit, all or an even selection of ``most``."""
    if limit <= most:
        return list(range(1, limit + 1))
    return sorted({1 + round(i * (limit - 1) / (most - 1)) for i in range(most)})
