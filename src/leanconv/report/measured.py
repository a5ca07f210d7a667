"""What ``bench --record`` and ``evaluate --record`` left in a folder, in one form for every kind of network."""

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
class Timed:
    """Both networks on one runtime at one batch size, milliseconds of a call."""

    runtime: str
    batch: int
    before: Interval
    after: Interval
    ratio: Interval
    noisy: bool


@dataclass(frozen=True, kw_only=True)
class LayerTimed:
    """A layer before and after, milliseconds of a batch."""

    name: str
    batch: int
    macs_ratio: float
    before: Interval
    after: Interval
    ratio: Interval
    noisy: bool


@dataclass(frozen=True, kw_only=True)
class Times:
    """``layers`` are those of the smallest batch size they were timed at."""

    measurements: list[Timed]
    layers: list[LayerTimed]
    machine: str
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class Score:
    """A measure as shares; ``original`` and what is lost are None where the accelerated network was judged alone, the
    ``interval`` of the loss where the measure has none."""

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
    scores: list[Score]  # what counts most first
    images: int
    data: str
    agreement: float | None


def times_of(data: dict[str, Any], folder: Path) -> Times | None:
    """Of ``bench.json``; None where one network was timed alone, which says nothing about speed-up."""
    try:
        batches = {one["batch"] for one in data["layers"]}
        machine, threads = data["machine"], data["machine"]["threads"]
        where = machine["gpu"] or f"{machine['cpu']}, {threads} thread{'' if threads == 1 else 's'}"
        conditions = data["conditions"]
        found = Times(
            measurements=[
                Timed(
                    runtime=one["runtime"],
                    batch=one["batch"],
                    **_pair(*one["networks"].values()),
                    ratio=Interval(**one["ratio"]),
                )
                for one in data["measurements"]
                if one["ratio"] is not None
            ],
            layers=[
                LayerTimed(
                    name=one["name"],
                    batch=one["batch"],
                    macs_ratio=one["macs_ratio"],
                    **_pair(one["before"], one["after"]),
                    ratio=Interval(**one["time_ratio"]),
                )
                for one in data["layers"]
                if one["batch"] == min(batches)
            ],
            machine=f"{where}, torch {machine['torch']}, {conditions['dtype']}, {conditions['input']}",
            notes=list(data["notes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _garbled(folder / "bench.json", error, "bench") from None
    return found if found.measurements else None


def _pair(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    def interval(one: dict[str, Any]) -> Interval:
        return Interval(value=one["median_ms"], low=one["low_ms"], high=one["high_ms"])

    return {"before": interval(before), "after": interval(after), "noisy": before["noisy"] or after["noisy"]}


def accuracy_of(data: dict[str, Any], folder: Path) -> Accuracy:
    """Of ``evaluation.json``: of a classifier or a detector, alone or beside the original."""
    try:
        if "map" in data:
            scores = [_score(f"mAP ({data['metric']})", data["map"])]
        else:
            scores = [_score("top-1", data["top1"]), _score("top-5", data["top5"])]
        return Accuracy(scores=scores, images=data["images"], data=str(data["data"]), agreement=data.get("agreement"))
    except (KeyError, TypeError, ValueError) as error:
        raise _garbled(folder / "evaluation.json", error, "evaluate") from None


def _score(label: str, found: Any) -> Score:
    if not isinstance(found, dict):
        return Score(label=label, value=float(found))
    interval = None
    if "low" in found:
        interval = Interval(value=found["increase"], low=found["low"], high=found["high"])
    return Score(
        label=label, value=found["other"], original=found["original"], lost=found["increase"], interval=interval
    )


def _garbled(path: Path, error: Exception, command: str) -> LeanconvError:
    return LeanconvError(f"{str(path)!r} lacks or garbles {error}; write it again with leanconv {command} --record.")
