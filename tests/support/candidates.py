"""Invented candidates for choosing ranks."""

from __future__ import annotations

from leanconv.forms import Choices
from leanconv.network.layers.geometry import Cost, Geometry
from leanconv.ranks import Candidate
from leanconv.ranks.candidates import Energies


def candidate(name: str, c: int, d: int, size: int = 14, k: int = 3, decay: float = 0.9) -> Candidate:
    geometry = Geometry(kind="conv2d", in_channels=c, out_channels=d, kernel=(k, k), padding=(k // 2, k // 2))
    spectra = {"channel": Energies([decay**i for i in range(geometry.channel_limit)])}
    if k > 1:
        spectra["spatial"] = Energies([decay**i for i in range(geometry.spatial_limit)])
    cost = Cost.of(geometry, (size, size), (size, size))
    return Candidate(name=name, geometry=geometry, cost=cost, spectra=spectra)


NETWORK = [
    candidate("a", 64, 64, 56, decay=0.8),
    candidate("b", 64, 128, 28, decay=0.95),
    candidate("c", 128, 128, 28, decay=0.9),
    candidate("d", 128, 256, 14, decay=0.97),
]


FIXED = 5_000_000


def achieved(candidates: list[Candidate], plan: Choices, fixed: int) -> float:
    before = fixed + sum(c.cost.dense for c in candidates)
    after = fixed + sum(c.macs(plan.get(c.name)) for c in candidates)
    return before / after
