"""A saved folder -> what its page says, as plain data. No HTML here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leanconv.errors import LeanconvError
from leanconv.forms.replace import Change
from leanconv.ranks import KeptSpectra
from leanconv.report.measured import Accuracy, Times, accuracy_of, times_of
from leanconv.report.repeat import at_another_speedup, original_of, repeat, weights_of
from leanconv.storage.folder import DESCRIPTION, read_description, read_spectra
from leanconv.storage.records import read_record


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """A layer that counts. ``scheme`` is None where it was left alone; then only MACs and the reason are known.

    ``limits`` are the full ranks that ``ranks`` were chosen from; ``filters_energy`` is that of the d'' of 3d.
    """

    name: str
    macs_before: int
    macs_after: int
    scheme: str | None = None
    ranks: tuple[int, ...] = ()
    limits: tuple[int, ...] = ()
    energy: float | None = None
    filters_energy: float | None = None
    error: float | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that the page says about a saved folder."""

    folder: str
    network: str
    original: str  # what the command line calls the network before, or MODEL
    weights: str | None  # and its --weights
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

    @property
    def speedup(self) -> float:
        return self.macs_before / self.macs_after

    @property
    def accelerated(self) -> list[LayerFacts]:
        return [layer for layer in self.layers if layer.scheme is not None]


def facts_of(folder: Path) -> Facts:
    """The facts of a folder that ``save`` wrote, with what ``--record`` put beside it. The network is not loaded."""
    data = read_description(folder)
    spectra = read_spectra(folder, data)
    bench, evaluation = read_record(folder, "bench"), read_record(folder, "evaluation")
    try:
        skipped: dict[str, list[str]] = {}
        for name, reason in data["skipped"].items():
            skipped.setdefault(reason, []).append(name)
        source = data["source"]
        return Facts(
            folder=str(folder),
            network=_short(source),
            original=original_of(data),
            weights=weights_of(data),
            **{
                key: data[key]
                for key in ("macs_before", "macs_after", "parameters_before", "parameters_after", "images", "options")
            },
            layers=_layers(data, spectra),
            skipped=skipped,
            repeat=repeat(data),
            another=at_another_speedup(data),
            typed=data.get("command") is not None,
            versions=data["made_with"],
            seconds=data["seconds"],
            tuned=_tuned(data),
            times=None if bench is None else times_of(bench, folder),
            accuracy=None if evaluation is None else accuracy_of(evaluation, folder),
            spectra=spectra,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise LeanconvError(
            f"{str(folder / DESCRIPTION)!r} lacks or garbles {error}; save the network again."
        ) from None


def _layers(data: dict[str, Any], spectra: KeptSpectra | None) -> list[LayerFacts]:
    """Every layer that counts, in the order they run. Without spectra the MACs of those left alone are known together
    only; they are one entry then."""
    changes = {change["name"]: Change.from_json(change) for change in data["changes"]}
    done = {layer["name"]: _accelerated(layer, changes[layer["name"]], spectra) for layer in data["layers"]}
    if spectra is not None:
        alone = {
            name: LayerFacts(name=name, macs_before=macs, macs_after=macs, reason=data["skipped"].get(name))
            for name, macs in spectra.counted.items()
        }
        return [done.get(name) or alone[name] for name in spectra.counted]
    rest = data["macs_before"] - sum(layer.macs_before for layer in done.values())
    if not rest:
        return list(done.values())
    return [LayerFacts(name="layers left alone", macs_before=rest, macs_after=rest), *done.values()]


def _accelerated(layer: dict[str, Any], change: Change, spectra: KeptSpectra | None) -> LayerFacts:
    g, scheme, ranks = change.geometry, layer["scheme"], tuple(layer["ranks"])
    limits = {
        "channel": (g.channel_limit,),
        "spatial": (g.spatial_limit,),
        "3d": (g.spatial_limit, g.channel_limit),
        "merged": (g.in_channels,),
    }[scheme]
    candidates = {} if spectra is None else {one.name: one for one in spectra.candidates}
    filters = (
        candidates[layer["name"]].spectra.get("spatial") if scheme == "3d" and layer["name"] in candidates else None
    )
    return LayerFacts(
        name=layer["name"],
        macs_before=layer["macs_before"],
        macs_after=layer["macs_after"],
        scheme=scheme,
        ranks=ranks,
        limits=limits,
        energy=layer["energy"],
        filters_energy=None if filters is None else filters.kept[ranks[0]],
        error=layer["error"],
    )


def _short(source: dict[str, Any]) -> str:
    """A class goes by its own name, without the modules it lies in."""
    name: str = source["name"]
    plain = source["library"] == "other" and ":" not in name and "/" not in name
    return name.rpartition(".")[2] if plain else name


def _tuned(data: dict[str, Any]) -> dict[str, Any] | None:
    training = data.get("training")
    return None if training is None else {**training["settings"], "distilled": training["distilled"]}
