"""What is known about several saved folders: cost, errors, and what was recorded of accuracy and time. No rendering."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from leanconv.errors import LeanconvError
from leanconv.report.compare.missing import remarks
from leanconv.report.measured import Accuracy, Timed, accuracy_of, times_of
from leanconv.report.repeat import UNKNOWN, original_of
from leanconv.storage.folder import DESCRIPTION, read_description
from leanconv.storage.records import read_record


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What times depend on besides the network. ``device`` is the GPU's name, or the CPU's."""

    runtime: str
    batch: int
    threads: int
    device: str
    gpu: bool
    dtype: str
    size: str  # of the input

    def __str__(self) -> str:
        threads = "GPU" if self.gpu else f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        return f"{self.runtime}, batch {self.batch}, {threads}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One saved folder. ``original`` is what the command line calls the network it was made from; errors are those of
    the layers when they were solved, before any fine-tuning."""

    folder: str
    source: str
    original: str
    command: tuple[str, ...]  # that made it, where it is known
    scheme: str
    tuned: bool
    macs_before: int
    macs_after: int
    parameters_before: int
    parameters_after: int
    mean_error: float
    max_error: float
    accuracy: Accuracy | None
    judged: tuple[str, ...]  # options of evaluate that say what accuracy was measured on
    times: tuple[tuple[Setting, Timed], ...]

    @property
    def speedup(self) -> float:
        return self.macs_before / self.macs_after

    @property
    def form(self) -> str:
        return self.scheme + (", tuned" if self.tuned else "")

    def to_json(self) -> dict[str, Any]:
        plain = {
            key: value for key, value in vars(self).items() if key not in ("accuracy", "judged", "times", "command")
        }
        return {
            **plain,
            "speedup": self.speedup,
            "accuracy": None if self.accuracy is None else asdict(self.accuracy),
            "times": [{**asdict(setting), **asdict(timed)} for setting, timed in self.times],
        }


@dataclass(frozen=True)
class Comparison:
    """Results of one original next to each other, the cheapest last; ``remarks`` say what keeps them from being
    compared, and what would mend it."""

    results: tuple[Result, ...]
    remarks: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"results": [result.to_json() for result in self.results], "remarks": list(self.remarks)}


def compare(folders: Sequence[str | Path]) -> Comparison:
    """Read what ``result.save``, ``bench --record`` and ``evaluate --record`` left in ``folders``."""
    if not folders:
        raise LeanconvError("no folder was given; give the saved folders to compare.")
    places: dict[Path, Path] = {}  # each once, however often and in whatever way it is named
    for folder in map(Path, folders):
        places.setdefault(folder.resolve(), folder)
    results = [_read(folder) for folder in places.values()]
    results.sort(key=lambda one: (one.source, one.macs_before, -one.macs_after, one.folder))
    return Comparison(tuple(results), tuple(remarks(results)))


def _read(folder: Path) -> Result:
    data = read_description(folder)
    evaluation = read_record(folder, "evaluation")
    try:
        errors = [float(layer["error"]) for layer in data["layers"]]
        original = original_of(data)
        return Result(
            folder=str(folder),
            source=data["source"]["name"] if original == UNKNOWN else original,
            original=original,
            command=tuple(data.get("command") or ()),
            scheme=data["options"]["scheme"],
            tuned=data.get("training") is not None,
            macs_before=data["macs_before"],
            macs_after=data["macs_after"],
            parameters_before=data["parameters_before"],
            parameters_after=data["parameters_after"],
            mean_error=sum(errors) / len(errors) if errors else math.nan,
            max_error=max(errors, default=math.nan),
            accuracy=None if evaluation is None else accuracy_of(evaluation, folder),
            judged=() if evaluation is None else _judged(evaluation),
            times=_times(folder),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise LeanconvError(
            f"{str(folder / DESCRIPTION)!r} lacks or garbles {error}; save the network again."
        ) from None


def _judged(evaluation: dict[str, Any]) -> tuple[str, ...]:
    usual = {"views": 1, "split": None, "metric": "voc"}
    asked = {key: evaluation.get(key, value) for key, value in usual.items()}
    more = [(f"--{key}", str(value)) for key, value in asked.items() if value != usual[key]]
    return ("--data", str(evaluation["data"]), *(word for pair in more for word in pair))


def _times(folder: Path) -> tuple[tuple[Setting, Timed], ...]:
    data = read_record(folder, "bench")
    found = None if data is None else times_of(data, folder)
    if data is None or found is None:
        return ()
    machine, conditions = data["machine"], data["conditions"]  # which times_of has looked at
    gpu = machine["gpu"]
    return tuple(
        (
            Setting(
                runtime=timed.runtime,
                batch=timed.batch,
                threads=machine["threads"],
                device=gpu or machine["cpu"],
                gpu=gpu is not None,
                dtype=conditions["dtype"],
                size=conditions["input"],
            ),
            timed,
        )
        for timed in found.measurements
    )
