"""What ``bench --record`` and ``evaluate --record`` left in a folder, as one type for every kind of network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leanconv.errors import LeanconvError


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class BeforeAfter:
    """Milliseconds of a batch."""

    batch: int
    before: Interval
    after: Interval
    ratio: Interval
    noisy: bool


@dataclass(frozen=True, kw_only=True)
class Timed(BeforeAfter):
    """Both networks in one setting. ``device`` is the name of the GPU, or of the CPU."""

    runtime: str
    threads: int
    device: str
    gpu: bool
    dtype: str
    size: str  # of the input

    @property
    def setting(self) -> str:
        threads = "GPU" if self.gpu else f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        return f"{self.runtime}, batch {self.batch}, {threads}"


@dataclass(frozen=True, kw_only=True)
class LayerTimed(BeforeAfter):
    name: str
    macs_ratio: float


@dataclass(frozen=True, kw_only=True)
class Times:
    """``layers`` are those of the smallest batch size they were timed at."""

    measurements: list[Timed]
    layers: list[LayerTimed]
    machine: str
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class Score:
    """A measure as shares; ``original`` and what is lost are None where the accelerated network was measured alone,
    the ``interval`` of the loss where the measure has none."""

    label: str
    value: float
    original: float | None = None
    lost: float | None = None
    interval: Interval | None = None

    @property
    def within_noise(self) -> bool | None:
        return None if self.interval is None else self.interval.low <= 0 <= self.interval.high


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """``options`` of ``leanconv evaluate`` say what it was measured on."""

    scores: list[Score]  # the most important first
    images: int
    data: str
    agreement: float | None
    options: tuple[str, ...]


def times_of(data: dict[str, Any], folder: Path) -> Times | None:
    """Of ``bench.json``; None where one network was timed alone, which says nothing about speed-up."""
    try:
        machine, conditions = data["machine"], data["conditions"]
        gpu, threads = machine["gpu"], machine["threads"]
        setting = {"threads": threads, "device": gpu or machine["cpu"], "gpu": gpu is not None}
        setting |= {"dtype": conditions["dtype"], "size": conditions["input"]}
        measurements = [
            Timed(runtime=one["runtime"], **setting, **_before_after(one, list(one["networks"].values()), one["ratio"]))
            for one in data["measurements"]
            if one["ratio"] is not None
        ]
        smallest = min((one["batch"] for one in data["layers"]), default=None)
        layers = [
            LayerTimed(
                name=one["name"],
                macs_ratio=one["macs_ratio"],
                **_before_after(one, [one["before"], one["after"]], one["time_ratio"]),
            )
            for one in data["layers"]
            if one["batch"] == smallest
        ]
        where = gpu or f"{machine['cpu']}, {threads} thread{'' if threads == 1 else 's'}"
        where = f"{where}, torch {machine['torch']}, {conditions['dtype']}, {conditions['input']}"
        notes = list(data["notes"])
    except (KeyError, TypeError, ValueError) as error:
        raise _garbled(folder / "bench.json", error, "bench") from None
    return Times(measurements=measurements, layers=layers, machine=where, notes=notes) if measurements else None


def _before_after(one: dict[str, Any], networks: list[dict[str, Any]], ratio: dict[str, Any]) -> dict[str, Any]:
    before, after = (Interval(value=net["median_ms"], low=net["low_ms"], high=net["high_ms"]) for net in networks)
    noisy = any(net["noisy"] for net in networks)
    return {"batch": one["batch"], "before": before, "after": after, "ratio": Interval(**ratio), "noisy": noisy}


def accuracy_of(data: dict[str, Any], folder: Path) -> Accuracy:
    """Of ``evaluation.json``: of a classifier or a detector, alone or together with the original."""
    usual = {"views": 1, "split": None, "metric": "voc"}
    try:
        if "map" in data:
            scores = [_score(f"mAP ({data['metric']})", data["map"])]
        else:
            scores = [_score("top-1", data["top1"]), _score("top-5", data["top5"])]
        options = ["--data", str(data["data"])]
        for key, value in usual.items():
            options += [f"--{key}", str(data[key])] if data.get(key, value) != value else []
        return Accuracy(
            scores=scores,
            images=data["images"],
            data=str(data["data"]),
            agreement=data.get("agreement"),
            options=tuple(options),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _garbled(folder / "evaluation.json", error, "evaluate") from None


def _score(label: str, data: Any) -> Score:
    if not isinstance(data, dict):
        return Score(label=label, value=float(data))
    lost = data["increase"]
    interval = Interval(value=lost, low=data["low"], high=data["high"]) if "low" in data else None
    return Score(label=label, value=data["other"], original=data["original"], lost=lost, interval=interval)


def _garbled(path: Path, error: Exception, command: str) -> LeanconvError:
    return LeanconvError(f"{str(path)!r} lacks or garbles {error}; write it again with leanconv {command} --record.")
