"""What ranks are chosen by: the spectra of every site's responses and filters."""

from __future__ import annotations

from collections.abc import Callable

import torch

from leanconv.calibrate.probes import Probe, Responses
from leanconv.calibrate.samples import Samples
from leanconv.errors import LeanconvError
from leanconv.forms.fit import channel_spectrum
from leanconv.network.layers.geometry import Scheme
from leanconv.network.sites import Survey
from leanconv.ranks import KeptSpectra, Pairs
from leanconv.ranks.candidates import Candidate, Energies
from leanconv.solve import SpatialBasis, SpatialFactors, spatial_basis
from leanconv.storage.workdir import Workdir


class Spectra:
    """Candidates for ranks, from the original's filters (``dense``) and its sampled responses (``targets``). What a
    ``work`` folder has of an earlier run is not computed again."""

    def __init__(self, dense: dict[str, Probe], targets: Samples, scheme: Scheme, work: Workdir | None):
        self.dense, self.targets = dense, targets
        self._scheme, self._work = scheme, work
        self._bases: dict[str, SpatialBasis] = {}
        self.candidates: dict[str, Candidate] = {
            name: Candidate(name=name, geometry=probe.site.geometry, cost=probe.site.cost)
            for name, probe in dense.items()
        }

    def measure(self, step: Callable[[], None]) -> None:
        """``step`` is called for every layer."""
        known = {} if self._work is None else self._work.spectra()
        before = sum(len(found) for found in known.values())
        for name, probe in self.dense.items():
            site, found = probe.site, known.setdefault(name, {})
            spatial = self._scheme != "channel" and site.geometry.splits_spatially
            if spatial and "spatial" not in found:
                found["spatial"] = self._basis(name).values.tolist()
            if "channel" not in found:
                responses = self.targets.get(name)
                check_sound(name, responses)
                if self._scheme != "spatial":
                    found["channel"] = channel_spectrum(probe, responses).tolist()
            self.candidates[name] = Candidate(
                name=name,
                geometry=site.geometry,
                cost=site.cost,
                channel=Energies(found["channel"]) if self._scheme != "spatial" else None,
                spatial=Energies(found["spatial"]) if spatial else None,
            )
            step()
        if self._work is not None and sum(len(found) for found in known.values()) > before:
            self._work.keep_spectra(known)

    def kept(self, pairs: Pairs, survey: Survey) -> KeptSpectra:
        """For the result, once ``measure`` is done."""
        counted: dict[str, int] = {}
        for layer in survey.layers:
            counted[layer.name] = counted.get(layer.name, 0) + layer.macs
        return KeptSpectra(
            scheme=self._scheme,
            candidates=tuple(self.candidates.values()),
            pairs=[pair for pair in pairs if set(pair) <= set(self.candidates)],
            fixed=survey.macs - sum(one.cost.dense for one in self.candidates.values()),
            counted=counted,
        )

    def split(self, name: str, rank: int) -> SpatialFactors:
        return self._basis(name).split(rank)

    def _basis(self, name: str) -> SpatialBasis:
        if name not in self._bases:
            self._bases[name] = spatial_basis(self.dense[name].weight)
        return self._bases[name]


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
