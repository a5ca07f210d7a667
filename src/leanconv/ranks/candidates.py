"""What rank selection knows of a site, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from leanconv.network.layers.cost import Cost
from leanconv.network.layers.geometry import Geometry, Scheme


@dataclass(frozen=True)
class Choice:
    """How one site is factorised: (d',) for channel, (d'',) for spatial, (d'', d') for 3d."""

    scheme: Scheme
    ranks: tuple[int, ...]


# A site without an entry stays dense.
Plan = dict[str, Choice]


class Energies:
    """Energy kept at every rank: ``kept[r]`` is the share of the total in the ``r`` largest values."""

    def __init__(self, values: list[float]):
        self.values = [max(value, 0.0) for value in values]
        sums = [0.0, *accumulate(self.values)]
        total = sums[-1]
        # A layer whose responses never vary loses nothing at any rank.
        self.kept = [value / total for value in sums] if total > 0 else [1.0] * len(sums)

    def loss(self, rank: int) -> float:
        """Relative energy loss of going from ``rank`` to ``rank - 1``: sigma_rank / sum of the first ``rank``."""
        return 1.0 - self.kept[rank - 1] / self.kept[rank] if self.kept[rank] > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A site that may be factorised. ``channel`` are response eigenvalues, ``spatial`` squared singular values of
    the filter matrix (only where the filters are k x k)."""

    name: str
    geometry: Geometry
    cost: Cost
    channel: Energies | None = None
    spatial: Energies | None = None

    def macs(self, choice: Choice | None) -> int:
        if choice is None:
            return self.cost.dense
        if choice.scheme == "channel":
            return self.cost.channel(choice.ranks[0])
        if choice.scheme == "spatial":
            return self.cost.spatial(choice.ranks[0])
        return self.cost.both(choice.ranks[0], choice.ranks[1])

    def energy(self, choice: Choice) -> float:
        """Energy kept: of the responses, except for the spatial scheme, where it is of the filters."""
        if choice.scheme == "spatial":
            return self.spatial.kept[choice.ranks[0]] if self.spatial else 1.0
        return self.channel.kept[choice.ranks[-1]] if self.channel else 1.0
