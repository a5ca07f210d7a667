"""A saved folder -> what its page says, as plain data. No HTML here."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from leanconv.errors import LeanconvError
from leanconv.forms import RESPONSES
from leanconv.forms.replace import Change
from leanconv.ranks import KeptSpectra
from leanconv.report.measured import Accuracy, Timed, Times, accuracy_of, times_of
from leanconv.report.repeat import UNKNOWN, at_another_speedup, original_of, original_options, repeat
from leanconv.result import HeldOut
from leanconv.storage.folder import DESCRIPTION, read_description, read_spectra
from leanconv.storage.records import read_record


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """A layer that counts. ``scheme`` is None if it was not replaced; then only MACs and the reason are known.

    ``limits`` are the full ranks of ``ranks``, ``kinds`` the names of their axes; ``responses`` and ``filters`` are the
    shares of energy that the ranks keep of each.
    """

    name: str
    macs_before: int
    macs_after: int
    scheme: str | None = None
    ranks: tuple[int, ...] = ()
    limits: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()
    energy: float | None = None
    filters: float | None = None
    error: float | None = None
    reason: str | None = None

    @property
    def responses(self) -> float | None:
        return self.energy if RESPONSES.name in self.kinds or not self.kinds else None

    @property
    def label(self) -> str:
        return form_label(self.scheme, self.ranks)


def form_label(scheme: str | None, ranks: tuple[int, ...]) -> str:
    """The form and its ranks, for people."""
    return "not replaced" if scheme is None else f"{scheme} {' × '.join(map(str, ranks))}"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that a page says about a saved folder."""

    folder: str
    network: str
    original: str  # what the command line calls the network before, or MODEL
    source: str  # the same, or the name of its class
    original_options: tuple[str, ...]  # --weights and the like of the original
    macs_before: int
    macs_after: int
    parameters_before: int
    parameters_after: int
    images: int
    layers: list[LayerFacts]
    skipped: dict[str, list[str]]  # by reason
    options: dict[str, Any]
    repeat: str
    another: str  # the same for a target of ``{speedup}``
    typed: bool  # whether ``repeat`` is the command as it was typed, or else a call in Python
    versions: dict[str, str]
    seconds: dict[str, float]
    tuned: dict[str, Any] | None  # settings of a fine-tuning since
    times: Times | None
    accuracy: Accuracy | None
    spectra: KeptSpectra | None
    check: HeldOut | None = None  # without labels, of the network as it was made

    @property
    def speedup(self) -> float:
        return self.macs_before / self.macs_after

    @property
    def accelerated(self) -> list[LayerFacts]:
        return [layer for layer in self.layers if layer.scheme is not None]

    @property
    def errors(self) -> dict[str, float]:
        """Of the layers when they were solved, before any fine-tuning."""
        return {layer.name: layer.error for layer in self.accelerated if layer.error is not None}

    @property
    def mean_error(self) -> float:
        return sum(self.errors.values()) / len(self.errors) if self.errors else math.nan

    @property
    def max_error(self) -> float:
        return max(self.errors.values(), default=math.nan)

    @property
    def measurements(self) -> list[Timed]:
        return self.times.measurements if self.times else []

    def to_json(self) -> dict[str, Any]:
        """One of several results, as ``leanconv compare --json`` prints it."""
        same = ("folder", "source", "original", "macs_before", "macs_after", "parameters_before", "parameters_after")
        return {
            **{name: getattr(self, name) for name in (*same, "mean_error", "max_error", "speedup")},
            "scheme": self.options["scheme"],
            "tuned": self.tuned is not None,
            "accuracy": None if self.accuracy is None else asdict(self.accuracy),
            "times": [asdict(timed) for timed in self.measurements],
        }


def facts_of(folder: Path) -> Facts:
    """The facts of a folder that ``save`` wrote, with what ``--record`` added to it. The network is not loaded."""
    data = read_description(folder)
    spectra = read_spectra(folder, data)
    bench, evaluation = read_record(folder, "bench"), read_record(folder, "evaluation")
    same = ("macs_before", "macs_after", "parameters_before", "parameters_after", "images", "options", "seconds")
    try:
        skipped: dict[str, list[str]] = {}
        for name, reason in data["skipped"].items():
            skipped.setdefault(reason, []).append(name)
        original, training = original_of(data), data.get("training")
        return Facts(
            folder=str(folder),
            network=_short(data["source"]),
            original=original,
            source=data["source"]["name"] if original == UNKNOWN else original,
            original_options=tuple(original_options(data.get("command") or [])),
            **{name: data[name] for name in same},
            layers=_layers(data, spectra),
            skipped=skipped,
            repeat=repeat(data),
            another=at_another_speedup(data),
            typed=data.get("command") is not None,
            versions=data["made_with"],
            tuned=None if training is None else {**training["settings"], "distilled": training["distilled"]},
            times=None if bench is None else times_of(bench, folder),
            accuracy=None if evaluation is None else accuracy_of(evaluation, folder),
            spectra=spectra,
            check=None if data.get("check") is None else HeldOut.from_json(data["check"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise LeanconvError(
            f"{str(folder / DESCRIPTION)!r} lacks or garbles {error}; save the network again."
        ) from None


def _layers(data: dict[str, Any], spectra: KeptSpectra | None) -> list[LayerFacts]:
    """Every layer that counts, in the order they run. Without spectra only the sum of the MACs of all layers that were
    not replaced is known; they are one entry then."""
    changes = {change["name"]: Change.from_json(change) for change in data["changes"]}
    done = {layer["name"]: _accelerated(layer, changes[layer["name"]], spectra) for layer in data["layers"]}
    if spectra is not None:
        dense = {
            name: LayerFacts(name=name, macs_before=macs, macs_after=macs, reason=data["skipped"].get(name))
            for name, macs in spectra.counted.items()
        }
        return [done.get(name) or dense[name] for name in spectra.counted]
    rest = data["macs_before"] - sum(layer.macs_before for layer in done.values())
    if not rest:
        return list(done.values())
    return [LayerFacts(name="layers not replaced", macs_before=rest, macs_after=rest), *done.values()]


def _accelerated(layer: dict[str, Any], change: Change, spectra: KeptSpectra | None) -> LayerFacts:
    geometry, form, ranks = change.geometry, change.form, tuple(layer["ranks"])
    candidates = spectra.candidates if spectra else ()
    known = next((candidate for candidate in candidates if candidate.name == layer["name"]), None)
    filters = layer["energy"] if form.axes and RESPONSES not in form.axes else None
    for axis, rank in zip(form.axes, ranks, strict=False):
        spectrum = None if known is None or axis is RESPONSES else known.spectrum(axis)
        filters = filters if spectrum is None else spectrum.kept[rank]
    return LayerFacts(
        **{name: layer[name] for name in ("name", "macs_before", "macs_after", "scheme", "energy", "error")},
        ranks=ranks,
        # A layer that is only merged has the d' of the one before it, of as many input channels.
        limits=form.limits(geometry) or (geometry.in_channels,),
        kinds=tuple(axis.name for axis in form.axes),
        filters=filters,
    )


def _short(source: dict[str, Any]) -> str:
    """The name of a class without that of its module."""
    name: str = source["name"]
    plain = source["library"] == "other" and ":" not in name and "/" not in name
    return name.rpartition(".")[2] if plain else name
