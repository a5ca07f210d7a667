"""What ranks were chosen by, kept with a result, so that they can be chosen again without the network."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from leanconv.forms import FORMS, Choices, Scheme, as_scheme
from leanconv.network.layers.geometry import Cost, Geometry
from leanconv.ranks.candidates import Candidate, Energies
from leanconv.ranks.merging import Pairs, reachable, select_merged

FORMAT = "leanconv-spectra"
VERSION = 1
# Every axis there is; older files lack some of them.
AXES = tuple(dict.fromkeys(axis.name for form in FORMS.values() for axis in form.axes))


@dataclass(frozen=True, kw_only=True)
class KeptSpectra:
    """The candidates of a run, in the order ranks are chosen in, and what else the choice depends on."""

    scheme: Scheme
    candidates: tuple[Candidate, ...]
    pairs: Pairs  # that may be merged
    fixed: int  # MACs of the layers that are counted but are no candidates
    counted: dict[str, int]  # MACs of every layer that counts, in the order they ran

    @property
    def reachable(self) -> float:
        """The largest speed-up there is."""
        return reachable(list(self.candidates), self.pairs, fixed=self.fixed, scheme=self.scheme)

    def select(self, speedup: float) -> tuple[Choices, Pairs]:
        """What ``ranks="energy"`` gives for another ``speedup``: the plan, and the pairs to merge."""
        return select_merged(
            list(self.candidates),
            self.pairs,
            fixed=self.fixed,
            speedup=speedup,
            scheme=self.scheme,
            search="greedy",
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "scheme": self.scheme.name,
            "fixed": self.fixed,
            "pairs": [list(pair) for pair in self.pairs],
            "counted": self.counted,
            "layers": [
                {
                    "name": one.name,
                    "geometry": one.geometry.to_json(),
                    "cost": asdict(one.cost),
                    **{name: None if name not in one.spectra else one.spectra[name].values for name in AXES},
                }
                for one in self.candidates
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> KeptSpectra:
        if data["format"] != FORMAT or data["version"] != VERSION:
            raise ValueError(f"version {data['version']}")
        return cls(
            scheme=as_scheme(data["scheme"]),
            fixed=data["fixed"],
            pairs=[(giver, taker) for giver, taker in data["pairs"]],
            counted=dict(data["counted"]),
            candidates=tuple(
                Candidate(
                    name=layer["name"],
                    geometry=Geometry.from_json(layer["geometry"]),
                    cost=Cost(**layer["cost"]),
                    spectra={name: Energies(layer[name]) for name in AXES if layer.get(name) is not None},
                )
                for layer in data["layers"]
            ),
        )
