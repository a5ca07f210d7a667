"""The records of ``bench --record`` and ``evaluate --record`` in a folder, in one form for every kind of network."""

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
    """A measure, from 0 to 1. Without the original's ``original`` and ``lost`` are None; ``interval`` is that of the
    loss, if the measure has one."""

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
    """``options`` are those of ``leanconv evaluate`` that say which data."""

    scores: list[Score]  # the most important first
    images: int
    data: str
    agreement: float | None
    options: tuple[str, ...]


def times_of(data: dict[str, Any], folder: Path) -> Times | None:
    """From ``bench.json``; None if only one network was timed, as that says nothing about speed-up."""
    try:
        machine, conditions = data["machine"], data["conditions"]
        gpu, threads = machine["gpu"], machine["threads"]
        setting = {"threads": threads, "device": gpu or machine["cpu"], "gpu": gpu is not None}
        setting |= {"dtype": conditions["dtype"], "size": conditions["input"]}
        measurements = [
            Timed(runtime=row["runtime"], **setting, **_before_after(row, list(row["networks"].values()), row["ratio"]))
            for row in data["measurements"]
            if row["ratio"] is not None
        ]
        smallest = min((row["batch"] for row in data["layers"]), default=None)
        layers = [
            LayerTimed(
                **{name: row[name] for name in ("name", "macs_ratio")},
                **_before_after(row, [row["before"], row["after"]], row["time_ratio"]),
            )
            for row in data["layers"]
            if row["batch"] == smallest
        ]
        where = gpu or f"{machine['cpu']}, {threads} thread{'' if threads == 1 else 's'}"
        where = f"{where}, torch {machine['torch']}, {conditions['dtype']}, {conditions['input']}"
        notes = list(data["notes"])
    except (KeyError, TypeError, ValueError) as error:
        raise _garbled(folder / "bench.json", error, "bench") from None
    return Times(measurements=measurements, layers=layers, machine=where, notes=notes) if measurements else None


def _before_after(row: dict[str, Any], timings: list[dict[str, Any]], ratio: dict[str, Any]) -> dict[str, Any]:
    before, after = (Interval(value=each["median_ms"], low=each["low_ms"], high=each["high_ms"]) for each in timings)
    noisy = any(each["noisy"] for each in timings)
    return {"batch": row["batch"], "before": before, "after": after, "ratio": Interval(**ratio), "noisy": noisy}


def accuracy_of(data: dict[str, Any], folder: Path) -> Accuracy:
    """From ``evaluation.json``: a classifier or a detector, alone or together with the original."""
    defaults = {"views": 1, "split": None, "metric": "voc"}
    try:
        if "map" in data:
            scores = [_score(f"mAP ({data['metric']})", data["map"])]
        else:
            scores = [_score("top-1", data["top1"]), _score("top-5", data["top5"])]
        options = ["--data", str(data["data"])]
        for key, value in defaults.items():
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
