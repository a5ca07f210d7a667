"""Detectors before and after acceleration, cell by cell: what is known is kept, what is there is not measured again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import leanconv
from benchmarks.common.machine import machine
from benchmarks.detection.training import (
    Canvases,
    Training,
    accelerated,
    backbone_macs,
    build,
    clocked,
    detect,
    facts,
    load,
    original,
    read,
    save,
    train,
)
from leanconv import LeanconvError
from leanconv.evaluation.voc_ap import Matches, match, mean_over_classes, paired_loss, precisions
from leanconv.images.detection_data import Scenes, find_scenes
from leanconv.storage.folder import load_result

Cell = dict[str, Any]
BASELINE = "baseline"
# What is done at every speed-up.
KINDS = {
    "first": "accelerated, then trained",
    "after": "trained, then accelerated",
    "tuned": "trained, accelerated, fine-tuned",
}
AFTER = {"refine": "closed-form"}  # how a trained detector is accelerated
TOGETHER = 8  # pictures a batch when a detector is accelerated
PAPER = "Fast R-CNN with VGG-16 on VOC 2007, accelerated, then trained: mAP 66.9; 66.9, 66.1, 65.2 at 3x, 4x, 5x."


def scenes_of(data: Path, split: str, limit: int | None) -> Scenes:
    found = find_scenes(data, split=split)
    return found.spread(limit) if limit and limit < len(found) else found


def name_of(kind: str, speedup: float | None, seed: int) -> str:
    return f"{kind}-seed{seed}" if speedup is None else f"{kind}-{speedup:g}x-seed{seed}"


def cells_of(table: Path) -> dict[str, Cell]:
    """The cells of a table, by their names."""
    if not table.is_file():
        raise LeanconvError(f"{str(table)!r} is no file; give the .json of a table.")
    known = json.loads(table.read_text())
    return {
        name_of(row["kind"], row["speedup"], seed): cell
        for row in known["rows"]
        for seed, cell in zip(known["seeds"], row["cells"], strict=True)
        if cell is not None
    }


@dataclass
class Trained:
    """A detector that was trained without acceleration, and what it finds."""

    detector: nn.Module
    matches: list[Matches]


@dataclass
class Bench:
    """``training`` of the detectors, ``tuning`` of those accelerated afterwards; ``calibration``: how many training
    pictures these are accelerated on."""

    data: Path
    weights: Path
    pictures: Sequence[Path]  # that the classifier is accelerated on
    work: Path
    training: Training
    tuning: Training
    size: int
    width: int
    calibration: int
    how: dict[str, Any]  # the classifier is accelerated: arguments of accelerate
    limit: int | None
    device: str
    known: Path | None  # a table whose cells are not measured again

    def __post_init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._known = {} if self.known is None else cells_of(self.known)
        for name, cell in self._known.items():
            self._same_settings(cell, f"{name} of {str(self.known)!r}")
        self._baselines: dict[int, Trained] = {}
        self._results: dict[Any, leanconv.Accelerated] = {}

    @cached_property
    def train_data(self) -> Canvases:
        with clocked(self.seconds, "read", self.device):
            return read(scenes_of(self.data, "train", self.limit), self.size, self.device)

    @cached_property
    def val_data(self) -> Canvases:
        with clocked(self.seconds, "read", self.device):
            return read(scenes_of(self.data, "val", self.limit), self.size, self.device)

    @property
    def settings(self) -> Cell:
        """What cells of one table have in common."""
        given = facts(self.training, size=self.size, width=self.width, classes=())
        given["training"].pop("seed")
        tuning = asdict(self.tuning)
        tuning.pop("seed")
        own = {
            "tuning": tuning,
            "calibration": self.calibration,
            "how": self.how,
            "after": AFTER,
            "leanconv": leanconv.__version__,
            "pictures": [place.name for place in self.pictures],
            "weights": [self.weights.name, self.weights.stat().st_size if self.weights.exists() else None],
        }
        # As it reads in a file, where there are no tuples.
        found: Cell = json.loads(json.dumps({**given, **own, "limit": self.limit}))
        return found

    def cell(self, name: str) -> Cell | None:
        file = self.work / "cells" / f"{name}.json"
        if not file.exists():
            return self._known.get(name)
        found: Cell = json.loads(file.read_text())
        self._same_settings(found, str(file))
        return found

    def _same_settings(self, cell: Cell, place: str) -> None:
        if cell["settings"] != self.settings:
            raise LeanconvError(
                f"{place} was measured with other settings ({cell['settings']}, now {self.settings}); give another "
                "--work or --known, or the settings of this one."
            )

    def measure(self, kind: str, speedup: float | None, seed: int) -> None:
        """Nothing, if the cell is there."""
        name = name_of(kind, speedup, seed)
        if self.cell(name) is not None:
            print(f"{name}: known", flush=True)
            return
        print(f"{name}:", flush=True)
        self.seconds = {}
        base = self.baseline(seed)
        if kind == BASELINE:
            return
        detector, result = self._made(kind, float(speedup or 0), seed, base)
        matches = self.judged(detector)
        loss, low, high = paired_loss(base.matches, matches)
        known: Cell = {"achieved": result.speedup, "difference": -loss, "low": -high, "high": -low}
        self._write(name, detector, matches, {"kind": kind, "speedup": speedup, "seed": seed, **known})

    def baseline(self, seed: int) -> Trained:
        """Trained, or as it was kept."""
        if seed not in self._baselines:
            name = name_of(BASELINE, None, seed)
            file = self._file(name)
            here, known = (self.work / "cells" / f"{name}.json").exists(), self.cell(name) is not None
            if file.exists() and (here or not known):
                detector, about = load(file)
                if {key: about[key] for key in self._about(seed)} != json.loads(json.dumps(self._about(seed))):
                    raise LeanconvError(f"{str(file)!r} was trained with other settings; give another --work.")
            elif known:
                raise LeanconvError(
                    f"cells of seed {seed} are compared with a detector that is not in {str(self.work)!r}, and a GPU "
                    "trains another one every time; give a seed that is not known yet."
                )
            else:
                detector = self._new(original(self.weights).features, seed)
                save(detector, file, self._about(seed))
            matches = self.judged(detector)
            if not known:
                self._write(name, detector, matches, {"kind": BASELINE, "speedup": None, "seed": seed})
            self._baselines = {seed: Trained(detector, matches)}
        return self._baselines[seed]

    def _file(self, name: str) -> Path:
        return self.work / "models" / f"{name}.safetensors"

    def _about(self, seed: int) -> Cell:
        settings = replace(self.training, seed=seed)
        return facts(settings, size=self.size, width=self.width, classes=self.train_data.classes)

    def _made(self, kind: str, speedup: float, seed: int, base: Trained) -> tuple[nn.Module, leanconv.Accelerated]:
        if kind == "first":
            result = self._once(("first", speedup), lambda: self.classifier(speedup))
            return self._new(result.model.features, seed), result
        result = self._once(
            ("after", speedup, seed),
            lambda: leanconv.accelerate(
                base.detector,
                self._calibration(),
                speedup,
                part="backbone",
                progress=False,
                device=self.device,
                **AFTER,
            ),
        )
        if kind == "tuned":
            with clocked(self.seconds, "tune", self.device):
                train(result.model, self.train_data, replace(self.tuning, seed=seed), self.device)
            self._results.pop(("after", speedup, seed))  # it is no longer what it was
        return result.model, result

    def classifier(self, speedup: float) -> leanconv.Accelerated:
        """Accelerated, or as it was kept: it is the same for every seed."""
        folder = self.work / "models" / f"classifier-{speedup:g}x"
        if folder.exists():
            kept = load_result(folder, original(None))
            made = {name: getattr(kept.options, name) for name in self.how}
            if made != self.how:
                raise LeanconvError(
                    f"{str(folder)!r} was accelerated with {made}, and {self.how} is asked for; give another --work, "
                    "or the settings of this one."
                )
            return kept
        result = accelerated(self.weights, self.pictures, speedup, self.device, self.limit, **self.how)
        result.save(folder)
        return result

    def _once(self, key: Any, make: Callable[[], leanconv.Accelerated]) -> leanconv.Accelerated:
        if key not in self._results:
            with clocked(self.seconds, "accelerate", self.device):
                self._results[key] = make()
        return self._results[key]

    def _new(self, features: Any, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        data, frozen = self.train_data, self.training.frozen
        detector = build(data.classes, features, size=self.size, width=self.width, frozen=frozen)
        with clocked(self.seconds, "train", self.device):
            train(detector, data, replace(self.training, seed=seed), self.device)
        return detector

    def _calibration(self) -> list[list[Tensor]]:
        data = self.train_data
        count = min(self.calibration, len(data))
        images = [data.image(number * len(data) // count) for number in range(count)]
        return [images[first : first + TOGETHER] for first in range(0, count, TOGETHER)]

    def judged(self, detector: nn.Module) -> list[Matches]:
        data = self.val_data
        with clocked(self.seconds, "detect", self.device):
            found = detect(detector, data, self.device)
        return match(found, data.targets, len(data.classes))

    def _write(self, name: str, detector: nn.Module, matches: Sequence[Matches], known: Cell) -> None:
        values = precisions(matches, None)
        cell = {
            **known,
            "map": mean_over_classes(values),
            "ap": {key: value for key, value in zip(self.val_data.classes, values, strict=True) if value == value},
            "macs": backbone_macs(detector, self.size, self.device),
            "seconds": self.seconds,
            "machine": machine(self.device),
            "leanconv": leanconv.__version__,
            "settings": self.settings,
        }
        self._keep(name, cell)
        print(f"{name}: mAP {100 * cell['map']:.2f}", flush=True)

    def _keep(self, name: str, cell: Cell) -> None:
        folder = self.work / "cells"
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{name}.part"
        part.write_text(json.dumps(cell, indent=1) + "\n")
        part.rename(folder / f"{name}.json")

    def table(self, speedups: Iterable[float], seeds: Iterable[int]) -> Cell:
        """Of these, and of those known from a table."""
        there = self._known.values()
        seeds = sorted({*seeds, *(cell["seed"] for cell in there)})
        speedups = sorted({*speedups, *(cell["speedup"] for cell in there if cell["speedup"] is not None)})
        rows: list[Cell] = [{"title": "original", "kind": BASELINE, "speedup": None}]
        rows += [
            {"title": f"{title}, {speedup:g}x", "kind": kind, "speedup": speedup}
            for kind, title in KINDS.items()
            for speedup in speedups
        ]
        for row in rows:
            row["cells"] = [self.cell(name_of(row["kind"], row["speedup"], seed)) for seed in seeds]
        known = [cell for row in rows for cell in row["cells"] if cell]
        return {
            "script": "benchmarks/detection/run.py",
            "machine": ", ".join(sorted({cell["machine"] for cell in known})),
            "leanconv": leanconv.__version__,
            "settings": self.settings,
            "seeds": seeds,
            "rows": rows,
            "paper": PAPER,
        }
