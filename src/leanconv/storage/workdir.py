"""The state of a run in a folder: what was measured and solved survives the process that did it.

    leanconv-work.json    the arguments, the number of threads, and whether the run is finished
    statistics/           sampled responses of the original network, raw numbers, and what they are
    spectra.json          what ranks are chosen by
    sensitivity.json      what every layer did to the output, from a folder of before; nothing reads it
    plan.json             the plan found by timing, with ranks="latency"
    solved/               a safetensors file for every layer, in the order they were solved
    distilling/           the state of the training with refine="distill"

Files appear whole or not at all: they are written under another name, flushed and renamed. A lock on the folder keeps
a second process out; the system releases it when the process ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from leanconv import __version__
from leanconv.calibrate.batches import Batch
from leanconv.config import Options
from leanconv.errors import LeanconvError
from leanconv.forms.fit import Fit, Outcome
from leanconv.network.function_trace import tensors
from leanconv.network.layers.modules import Factors
from leanconv.system.atomic_files import flush, lock_folder, replaced

log = logging.getLogger("leanconv")

FORMAT = "leanconv-work"
VERSION = 1
STATE, SAMPLES, FACTS = "leanconv-work.json", "statistics", "facts.json"
SPECTRA, SENSITIVITY, SOLVED, DISTILLING = "spectra.json", "sensitivity.json", "solved", "distilling"
PLAN = "plan.json"
PART = ".part"  # the end of the name of what is being written
OLD = ".old"  # and of what is being removed
REMOVED = (SAMPLES, SPECTRA, SENSITIVITY, SOLVED, DISTILLING)
# All names that may end in PART.
OWN = (STATE, SAMPLES, SPECTRA, SENSITIVITY, PLAN, *(f"{name}{OLD}" for name in REMOVED))

# What was measured: the file and its key.
NOTES = {"spectra": (SPECTRA, "spectra"), "plan": (PLAN, "plan")}

# Arguments the statistics depend on.
BASIS = ("model", "images", "put aside", "device", "samples", "seed", "leanconv", "torch")


class Workdir:
    """An opened and locked folder. ``close`` when done."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self.folder)
        parts = [self.folder / f"{name}{PART}" for name in OWN] + list((self.folder / SOLVED).glob(f"*{PART}"))
        if not (self.folder / STATE).exists() and any(item not in parts for item in self.folder.iterdir()):
            self.close()
            raise LeanconvError(
                f"workdir={str(folder)!r} holds other files and no earlier run; give a new or empty folder."
            )
        for left in parts:  # of a process that was killed
            if left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._lock)

    def begin(self, given: dict[str, Any], options: Options) -> None:
        """Use the statistics in the folder for these images and this network; refuse arguments that differ, by name."""
        facts = {**given, "leanconv": __version__, "torch": torch.__version__, **options.to_json()}
        basis = {key: facts[key] for key in BASIS}
        known = self._load(STATE)
        if known is not None:
            known["basis"] = {"put aside": 0, **known["basis"]}  # of a folder from before any were put aside
            if not known["basis"].pop("all images", True):  # of one from before their number was kept
                known["basis"]["put aside"] = None
            same_images = {**basis, "put aside": known["basis"]["put aside"]}
            self._compare(same_images, known["basis"], "statistics of a run")
            if basis != known["basis"]:  # fitted to another part: nothing that was measured serves both
                if not known["finished"]:
                    self._compare(self._arguments(options)[0], self._completed(known)["run"], "an unfinished run")
                log.warning(
                    "workdir=%r holds what was measured on another part of these images than refine=%r is fitted to: "
                    "it is measured anew, in place of that. A folder for each would keep both.",
                    str(self.folder),
                    options.refine,
                )
                for part in (DISTILLING, SOLVED, SENSITIVITY, SPECTRA, SAMPLES):
                    self._remove(part)
                known = None
        self._state: dict[str, Any]
        self._state = {"basis": basis, "run": None, "solving": None, "finished": False} if known is None else known
        self._state["basis"] = basis
        self._store(STATE, self._state)

    @property
    def threads(self) -> int | None:
        """CPU threads of the run that is in here; None for a new one, or an older folder."""
        return cast("int | None", self._state.get("threads"))

    @threads.setter
    def threads(self, count: int) -> None:
        self._state["threads"] = count
        self._store(STATE, self._state)

    def begin_run(self, options: Options, plan: dict[str, Any] | None = None) -> None:
        """Start a run of these arguments or continue it; refuse arguments that differ from an unfinished run, by name.
        Layers solved for another ``plan`` are removed."""
        run, solving = self._arguments(options)
        known = self._completed(self._state)
        if known["run"] is not None and run != known["run"]:
            if not known["finished"] and (self.folder / SOLVED).exists():  # else nothing would be lost
                self._compare(run, known["run"], "an unfinished run")
            self._remove(DISTILLING)
            if solving != known["solving"]:
                self._remove(SOLVED)
        finished, before = known["finished"] and run == known["run"], known["plan"]
        if None not in (plan, before) and plan != before:
            self._remove(DISTILLING)
            self._remove(SOLVED)
            finished = False
        self._state = {
            **known,
            "run": run,
            "solving": solving,
            "plan": before if plan is None else plan,
            "finished": finished,
        }
        self._store(STATE, self._state)

    def _arguments(self, options: Options) -> tuple[dict[str, Any], dict[str, Any]]:
        """All arguments of a run, and those that a solved layer depends on: distillation comes later, and ranks by
        timing differ every time."""
        run = {key: value for key, value in options.to_json().items() if key not in BASIS}
        timed = options.target is not None
        return run, run if timed else {**run, "refine": options.closed_form, "steps": None}

    def _completed(self, known: dict[str, Any]) -> dict[str, Any]:
        """Add the arguments that older folders lack."""
        for part in ("run", "solving"):
            if known.get(part) is not None:
                known[part] = {"steps": None, "sweeps": 0, **known[part]}
        return {"run": None, "solving": None, "plan": None, **known}

    def finish(self) -> None:
        self._state["finished"] = True
        self._store(STATE, self._state)

    def _compare(self, wanted: dict[str, Any], known: dict[str, Any], what: str) -> None:
        words = {"model": "weights or layers", "images": "images or batches"}
        for key, value in wanted.items():
            if value != known.get(key):
                if key in ("model", "images"):
                    raise LeanconvError(
                        f"workdir={str(self.folder)!r} holds {what} with other {words[key]}; give the same again, "
                        "or another workdir."
                    )
                raise LeanconvError(
                    f"workdir={str(self.folder)!r} holds {what} with {key}={known.get(key)!r}, but {key}={value!r} was "
                    "given; give the same arguments, or another workdir."
                )

    @contextmanager
    def new_samples(self) -> Iterator[Path]:
        """A folder for samples; it replaces the old one when the block ends well. Call ``describe`` in the block."""
        part = self.folder / f"{SAMPLES}{PART}"
        with self._writing():
            part.mkdir()
            try:
                yield part
                flush(part)
            except BaseException:
                self._remove(part.name)  # half of them are of no use, and take room
                raise
            self._remove(SAMPLES)
            part.rename(self.samples)

    @property
    def samples(self) -> Path:
        return self.folder / SAMPLES

    def describe(self, sites: dict[str, Any], largest: int | None, images: int) -> None:
        """What the files in the new folder are, what batches were cut to and how many images there were."""
        facts = {"sites": sites, "largest": largest, "images": images}
        self._store(f"{SAMPLES}{PART}/{FACTS}", facts)

    def described(self) -> tuple[dict[str, Any], int | None, int | None]:
        """What an earlier run described, if any. Older folders do not count their images."""
        facts = self._load(f"{SAMPLES}/{FACTS}") or {"sites": {}, "largest": None}
        return facts["sites"], facts["largest"], facts.get("images")

    def read_notes(self, name: str) -> dict[str, Any]:
        """What an earlier run wrote under this name, if anything."""
        file, key = NOTES[name]
        return (self._load(file) or {key: {}})[key]  # type: ignore[no-any-return]

    def write_notes(self, name: str, data: dict[str, Any]) -> None:
        file, key = NOTES[name]
        self._store(file, {key: data})

    def solved(self, device: torch.device) -> dict[str, Fit]:
        """The layers solved so far."""
        found: dict[str, Fit] = {}
        for path in sorted((self.folder / SOLVED).glob("*.safetensors")):
            try:
                with safetensors.safe_open(path, "pt", device=str(device)) as file:
                    facts = json.loads(file.metadata()["leanconv"])
                    weights = [file.get_tensor(f"weight{number}") for number in range(facts["weights"])]
                    bias = file.get_tensor("bias")
            except (OSError, safetensors.SafetensorError, KeyError, ValueError) as error:
                raise LeanconvError(f"{str(path)!r} is damaged ({type(error).__name__}); delete it.") from None
            counted = facts.get("samples", 0), facts.get("enough"), facts.get("needed")  # older files lack them
            found[facts["name"]] = Fit(Factors(tuple(weights), bias), Outcome(facts["error"], *counted))
        return found

    def keep_solved(self, number: int, name: str, fit: Fit) -> None:
        weights = fit.factors.weights
        held = {f"weight{i}": weight.contiguous() for i, weight in enumerate(weights)} | {"bias": fit.factors.bias}
        facts = json.dumps({"name": name, "weights": len(weights), **asdict(fit.outcome)})
        with self._writing():
            place = self.folder / SOLVED
            place.mkdir(exist_ok=True)
            with replaced(place / f"{number:05d}.safetensors", place / f"{number:05d}{PART}") as part:
                safetensors.torch.save_file(held, part, {"leanconv": facts})

    @property
    def distilling(self) -> Path:
        return self.folder / DISTILLING

    def _load(self, name: str) -> dict[str, Any] | None:
        try:
            data: dict[str, Any] = json.loads((self.folder / name).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise LeanconvError(
                f"workdir={str(self.folder)!r}: {name} cannot be read ({type(error).__name__}); delete the folder."
            ) from None
        if data.get("format") != FORMAT or data.get("version") != VERSION:
            raise LeanconvError(
                f"workdir={str(self.folder)!r} was written by another version of leanconv; give another folder."
            )
        return data

    def _store(self, name: str, data: dict[str, Any]) -> None:
        with self._writing(), replaced(self.folder / name, self.folder / f"{name}{PART}") as part:
            part.write_text(json.dumps({**data, "format": FORMAT, "version": VERSION}))

    def _remove(self, name: str) -> None:
        """Renamed first: a folder is there or not, never half."""
        with contextlib.suppress(FileNotFoundError):
            gone = self.folder / f"{name}{OLD}{PART}"
            (self.folder / name).rename(gone)
            if gone.is_dir():
                shutil.rmtree(gone)
            else:
                gone.unlink()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, safetensors.SafetensorError) as error:
            said = getattr(error, "strerror", None) or str(error)
            raise LeanconvError(
                f"cannot write to workdir={str(self.folder)!r}: {said}; make room or give another folder, what was "
                "done so far is kept."
            ) from error


def digest_of_model(model: nn.Module) -> str:
    """A hash of the printed layers, and of names, shapes and numbers of all parameters and buffers."""
    total = hashlib.sha256(repr(model).encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        _add(total, tensor)
    return total.hexdigest()


def digest_of_batch(batch: Batch) -> tuple[int, str]:
    """The hash of a batch, behind the index of its first image."""
    total = hashlib.sha256()
    for tensor in tensors(batch.pieces):
        total.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        _add(total, tensor)
    return batch.first, total.hexdigest()


def _add(total: Any, tensor: Tensor) -> None:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    total.update(flat.numpy())
