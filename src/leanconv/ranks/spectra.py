"""The spectra of every layer's responses and filters, and how they are saved: ranks can then be chosen again without
the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from leanconv.calibrate.gradients import Gradients
from leanconv.calibrate.probes import PatchProbe, Probe, Responses
from leanconv.calibrate.samples import Samples
from leanconv.calibrate.streams import Streams, collected, drawn
from leanconv.errors import LeanconvError
from leanconv.forms import FORMS, RESPONSES, Axis, Choice, Scheme, as_scheme
from leanconv.forms.fit import response_spectrum
from leanconv.network.layers.geometry import Cost, Geometry
from leanconv.network.sites import Survey
from leanconv.ranks.candidates import Candidate, Energies
from leanconv.ranks.merging import Pairs, Problem
from leanconv.solve import FilterBasis, TwoStep

# Images that show what spatial splits lose, and patches of a layer: 151 MB for 512 channels and 3 x 3 filters.
IMAGES, ROWS = 128, 8192

FORMAT = "leanconv-spectra"
VERSION = 1
# Every axis there is; older files lack some of them.
AXES = tuple(dict.fromkeys(axis.name for form in FORMS.values() for axis in form.axes))


@dataclass(frozen=True, kw_only=True)
class KeptSpectra(Problem):
    """The problem of a run, saved with its result. ``select`` chooses for any speed-up as ``ranks="energy"`` does."""

    counted: dict[str, int]  # MACs of every layer that counts, in the order they ran

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


# Energies by layer and axis name.
Known = dict[str, dict[str, list[float]]]


class Spectra:
    """Candidates for ranks, from the original's filters (``dense``) and its sampled responses (``targets``)."""

    def __init__(self, dense: dict[str, Probe], targets: Samples, scheme: Scheme):
        self.dense, self.targets, self.scheme = dense, targets, scheme
        self._bases: dict[tuple[str, Axis], FilterBasis] = {}
        self._seen: dict[tuple[str, Axis], FilterBasis | None] = {}  # None where patches never vary
        self._patches: Samples | None = None
        self.candidates: dict[str, Candidate] = {
            name: Candidate(name=name, geometry=probe.site.geometry, cost=probe.site.cost)
            for name, probe in dense.items()
        }

    def measure(self, known: Known, step: Callable[[], None]) -> bool:
        """Fill ``known`` and the candidates; what is known is not computed again. Whether anything was. ``step`` is
        called for every layer."""
        before = sum(len(found) for found in known.values())
        for name, probe in self.dense.items():
            site, found = probe.site, known.setdefault(name, {})
            axes = dict.fromkeys(axis for form in self.scheme.applicable(site.geometry) for axis in form.axes)
            for axis in axes:
                if axis.basis is not None and axis.name not in found:
                    found[axis.name] = self._basis(name, axis).values.tolist()
            if RESPONSES.name not in found:
                responses = self.targets.get(name)
                check_sound(name, responses)
                if RESPONSES in axes:
                    found[RESPONSES.name] = response_spectrum(probe, responses).tolist()
            self.candidates[name] = Candidate(
                name=name,
                geometry=site.geometry,
                cost=site.cost,
                spectra={axis.name: Energies(found[axis.name]) for axis in axes},
            )
            step()
        return sum(len(found) for found in known.values()) > before

    def kept(self, pairs: Pairs, survey: Survey) -> KeptSpectra:
        """For the result, once ``measure`` is done."""
        counted: dict[str, int] = {}
        for layer in survey.layers:
            counted[layer.name] = counted.get(layer.name, 0) + layer.macs
        return KeptSpectra(
            scheme=self.scheme,
            candidates=tuple(self.candidates.values()),
            pairs=[pair for pair in pairs if set(pair) <= set(self.candidates)],
            fixed=survey.macs - sum(one.cost.dense for one in self.candidates.values()),
            counted=counted,
        )

    def patches(self, streams: Streams) -> Samples:
        """Some of what every layer with filters to split sees. One pass of IMAGES images, the first time."""
        if self._patches is None:
            probes: dict[str, Probe] = {
                name: PatchProbe(probe.site, probe.weight, probe.bias)
                for name, probe in self.dense.items()
                if self._split_axes(name)
            }
            images = drawn(streams, IMAGES)
            with streams.clock.stage("looking at patches"), streams.reporter.stage("patches", len(images)) as stage:
                self._patches = (
                    collected(streams, images, probes, ROWS, stage.advance) if probes else Samples(streams.memory)
                )
        return self._patches

    def see(self, streams: Streams, gradients: Mapping[str, Gradients]) -> None:
        """Find how to split filters for what their layers see, and for what the output feels of it."""
        for name, probe in self.dense.items():
            metric = gradients[name].metrics[0] if name in gradients else None
            for axis in self._split_axes(name):
                if axis.basis_as_seen is None or (name, axis) in self._seen:
                    continue
                patches = self.patches(streams).get(name).y
                with streams.clock.stage("looking at patches"):
                    self._seen[name, axis] = axis.basis_as_seen(probe.weight, patches, metric)
            if self._patches is not None:
                self._patches.drop(name)

    def seen_energies(self, name: str) -> dict[Axis, Energies]:
        """Along the axes that ``see`` has looked at."""
        found = {axis: basis for (seen, axis), basis in self._seen.items() if seen == name}
        return {axis: Energies(basis.values.tolist()) for axis, basis in found.items() if basis is not None}

    def _split_axes(self, name: str) -> list[Axis]:
        forms = self.scheme.applicable(self.dense[name].site.geometry)
        return list(dict.fromkeys(axis for form in forms for axis in form.axes if axis.basis is not None))

    def close(self) -> None:
        self.targets.close()
        if self._patches is not None:
            self._patches.close()

    def split_of(self, name: str, choice: Choice, *, seen: bool) -> TwoStep | None:
        """The two factors that the layer's filters become before anything is fitted; None for a form without. ``seen``:
        for what it sees, after ``see``."""
        axis = choice.form.split_axis
        return None if axis is None else self.split(name, axis, choice.ranks[choice.form.axes.index(axis)], seen=seen)

    def split(self, name: str, axis: Axis, rank: int, *, seen: bool) -> TwoStep:
        basis = self._seen.get((name, axis)) if seen else None
        return (basis or self._basis(name, axis)).split(rank)

    def _basis(self, name: str, axis: Axis) -> FilterBasis:
        if (name, axis) not in self._bases:
            assert axis.basis is not None
            self._bases[name, axis] = axis.basis(self.dense[name].weight)
        return self._bases[name, axis]


def check_sound(name: str, responses: Responses) -> None:
    """One number that is none would spoil the moments of all."""
    sound = torch.isfinite(responses.y).all()
    if responses.addend is not None:
        sound = sound & torch.isfinite(responses.addend).all()
    if not bool(sound):
        raise LeanconvError(
            f"layer {name!r} receives NaN or infinite values on these images; check the images' preprocessing "
            "and the layers before it."
        )
