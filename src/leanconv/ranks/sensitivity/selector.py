"""Ranks that together change the network's output least: what is measured of every layer, and the choice by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from leanconv.calibrate.streams import drawn
from leanconv.errors import LeanconvError
from leanconv.forms import CHANNEL, RESPONSES, Axis, Choice, Choices, Form, Scheme
from leanconv.forms.fit import split_factors
from leanconv.forms.replace import Change, change_of
from leanconv.network.layers.modules import Factors
from leanconv.ranks.candidates import Candidate
from leanconv.ranks.merging import Pairs
from leanconv.ranks.selector import Energy, RankSelector, Request
from leanconv.ranks.sensitivity.measure import Listener, Projected, split_losses, split_probe
from leanconv.ranks.sensitivity.merit import LayerSensitivity, Points, least_change
from leanconv.ranks.spectra import Spectra

# Images that outputs are compared on. Every measurement runs them once: VGG-16's twelve layers at three losses take 576
# images. FITTED: images that show what spatial splits lose, in two passes.
IMAGES, FITTED = 16, 128
# Shares of a layer's response energy that are removed. The smallest hardly changes the output of one layer alone; once
# all layers lose some, the output changes as much as the larger ones show.
LOSSES = (0.3, 0.1, 0.03)
# Shares of a layer's cost at which its splits are looked at.
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)


@dataclass(frozen=True)
class Sensitivity(Energy):
    """Measures what approximating every layer alone does to the output, and chooses the forms and ranks that together
    change it least."""

    name = "sensitivity"

    def prepared(self, model: nn.Module, sample: Any, *, comparable: bool) -> RankSelector:
        if not comparable:
            raise LeanconvError(
                "ranks='sensitivity' compares outputs, and this network returns no floating-point tensors; use "
                "ranks='energy'."
            )
        return self

    def choose(self, request: Request) -> tuple[Choices, Pairs]:
        with request.streams.clock.stage("measuring layers"):
            measured = measure_sensitivity(request)
        return request.search("forms", least_change(measured, refits=request.refits and request.scheme.fitted))


def measure_sensitivity(request: Request) -> dict[str, LayerSensitivity]:
    """Measure every candidate. What the notes know already is not measured again."""
    streams, spectra, scheme = request.streams, request.spectra, request.scheme
    candidates = spectra.candidates
    # Along which axis the output is measured, and which splits: a scheme that does not cut responses has splits only,
    # and nothing corrects them.
    splits = [axis for axis in scheme.axes if axis.basis is not None]
    shown = RESPONSES if scheme.fitted else splits[0]
    key = {axis: f"{axis.name} splits{'' if scheme.fitted else ' as they are'}" for axis in splits}
    known = request.notes.read("sensitivity")
    ranks = {
        name: _by_loss(one) if scheme.fitted else _by_share(one, scheme, shown) for name, one in candidates.items()
    }
    losing = {name: some for name, some in ranks.items() if shown.name not in known.setdefault(name, {})}
    split = {
        axis: {name: _by_share(one, scheme, axis) for name, one in candidates.items() if key[axis] not in known[name]}
        for axis in splits
    }
    steps = sum(map(len, [*losing.values(), *(some for layers in split.values() for some in layers.values())]))
    with streams.reporter.stage("measuring layers", steps) as stage:
        for axis, layers in split.items():
            if any(layers.values()):
                images = drawn(streams, FITTED)
                losses = split_losses(streams, spectra, axis, images, layers, stage.advance, corrected=scheme.fitted)
                for name, points in losses:
                    known[name][key[axis]] = points
        if any(losing.values()):
            listener = Listener(streams.original, drawn(streams, IMAGES), streams.device, streams.seed)
            for name, some in losing.items():
                lost, changes = known[name].get(key.get(shown), ()), []
                for loss, change, factors in _approximations(spectra, scheme, shown, name, some, lost):
                    changes.append((loss, listener.change(change, factors)))
                    stage.advance()
                known[name][shown.name] = tuple(changes)
    if losing or any(split.values()):
        request.notes.write("sensitivity", known)
    return {
        name: LayerSensitivity(
            output=known[name].get(shown.name, ()), splits={axis: known[name].get(key[axis], ()) for axis in splits}
        )
        for name in candidates
    }


def _by_loss(one: Candidate) -> list[int]:
    """The smallest ranks that lose no more than LOSSES; not full rank, which loses nothing."""
    spectrum = one.spectrum(RESPONSES)
    assert spectrum is not None
    kept, full = spectrum.kept, one.geometry.channel_limit
    found = {next((rank for rank in range(1, full) if 1.0 - kept[rank] <= loss), full) for loss in LOSSES}
    return sorted(rank for rank in found if rank < full and kept[rank] < 1)


def _by_share(one: Candidate, scheme: Scheme, axis: Axis) -> list[int]:
    """The ranks of a split that cost SHARES of the layer; not full rank."""
    spectrum = one.spectrum(axis)
    if spectrum is None:
        return []
    form = _split_form(scheme, axis)
    full, *others = form.limits(one.geometry)
    unit = form.macs(one.cost, (1, *others)) - form.macs(one.cost, (0, *others))
    found = {max(1, round(share * one.cost.dense / unit)) for share in SHARES}
    return sorted(rank for rank in found if rank < full and spectrum.kept[rank] < 1)


def _split_form(scheme: Scheme, axis: Axis) -> Form:
    """The form with fewest ranks that cuts along ``axis`` first."""
    return next(form for form in scheme.forms if form.axes[0] is axis)


def _approximations(
    spectra: Spectra, scheme: Scheme, axis: Axis, name: str, ranks: list[int], lost: Points
) -> Iterator[tuple[float, Change, Factors]]:
    """Energy of responses lost, and the factors: with responses on their leading components, or, in a scheme that is
    not fitted, splits that have ``lost`` so much."""
    site = spectra.dense[name].site
    if not scheme.fitted:
        form = _split_form(scheme, axis)
        for rank, (_, loss) in zip(ranks, lost, strict=True):
            probe = split_probe(spectra, name, axis, rank)
            yield loss, change_of(site, Choice(form, (rank,))), split_factors(probe)
        return
    energies = spectra.candidates[name].spectrum(RESPONSES)
    assert energies is not None
    projected = Projected(spectra.dense[name], spectra.targets.get(name).y, max(ranks, default=0))
    for rank in ranks:
        yield 1.0 - energies.kept[rank], change_of(site, Choice(CHANNEL, (rank,))), projected.factors(rank)
