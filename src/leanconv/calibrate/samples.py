"""Sampled responses of many sites, kept in memory or in files until their site's turn comes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from leanconv.calibrate.memory import Memory, Place, write_numbers
from leanconv.calibrate.probes import Responses
from leanconv.calibrate.row_storage import Room, Rows
from leanconv.errors import LeanconvError

# Of what is free, so much for the responses of one site at most: the frontiers want memory too.
SHARE = 0.5

Piece = tuple[int, Responses]  # with the number of its first image


@dataclass
class _Kept:
    place: Place
    size: int  # bytes reserved for it
    pieces: list[Piece] = field(default_factory=list)
    arrays: dict[str, Rows] = field(default_factory=dict)
    files: dict[str, IO[bytes]] = field(default_factory=dict)
    rows: int = 0
    width: int = 0
    dtype: str = "float32"
    adds: bool = False

    def facts(self) -> dict[str, Any]:
        return {"rows": self.rows, "width": self.width, "dtype": self.dtype, "adds": self.adds}


class Samples:
    """``folder``: keep everything there, to be used by later runs; else in ``memory``, in unnamed files at last."""

    def __init__(self, memory: Memory, folder: Path | None = None):
        self._memory, self._folder = memory, folder
        self._kept: dict[str, _Kept] = {}

    def expect(self, name: str, *, rows: int, width: int, dtype: torch.dtype, adds: bool) -> None:
        """About ``rows`` x ``width`` numbers will come for site ``name``, twice if it ``adds``."""
        size = rows * width * dtype.itemsize * (2 if adds else 1)
        place: Place | None = "disk"
        if self._folder is None:
            place = self._memory.reserve(size, share=SHARE) or self._memory.reserve(size)
        if place is None:
            raise LeanconvError(
                f"the sampled responses of layer {name!r} ({size / 1e6:.0f} MB) fit neither in memory nor on disk; "
                "give more memory, a workdir with room, or fewer samples."
            )
        kept = _Kept(place, 0 if self._folder else size, width=width, adds=adds)
        kept.dtype = str(dtype).removeprefix("torch.")
        if place == "host":
            kept.arrays = {end: Rows(rows, width, dtype) for end in kept_parts(adds)}
        self._kept[name] = kept

    def add(self, name: str, first: int, found: Responses) -> None:
        kept = self._kept[name]
        if kept.place == "device":
            kept.pieces.append((first, found))
        for end, tensor in (("y", found.y), ("addend", found.addend)):
            if tensor is None or kept.place == "device":
                continue
            if kept.place == "host":
                kept.arrays[end].add(tensor)
                continue
            if end not in kept.files:
                kept.files[end] = self._file(name, end)
            write_numbers(tensor, kept.files[end])
        kept.rows += len(found.y)

    def _file(self, name: str, end: str) -> IO[bytes]:
        if self._folder is None:
            return tempfile.TemporaryFile(dir=self._memory.folder, buffering=0)
        return (self._folder / file_name(name, end)).open("w+b", buffering=0)

    def get(self, name: str) -> Responses:
        """All responses of a site, in the order of the images."""
        kept = self._kept[name]
        if kept.place == "disk":
            return Responses(self._read(kept, "y"), self._read(kept, "addend") if kept.adds else None)
        if kept.place == "host":
            parts = [kept.arrays[end].found.to(self._memory.device) for end in kept_parts(kept.adds)]
        else:
            return joined([found for _, found in kept.pieces])
        return Responses(*parts)

    def _read(self, kept: _Kept, end: str) -> Tensor:
        file = kept.files[end]
        file.flush()
        file.seek(0)
        numbers = np.fromfile(file, kept.dtype, kept.rows * kept.width)
        file.seek(0, 2)
        if len(numbers) != kept.rows * kept.width:
            raise LeanconvError(
                f"{getattr(file, 'name', 'a file')!r} is shorter than it was written; delete the workdir."
            )
        return torch.from_numpy(numbers).reshape(kept.rows, kept.width).to(self._memory.device)

    def drop(self, name: str) -> None:
        kept = self._kept.pop(name, None)
        if kept is None:
            return
        if kept.size:
            self._memory.release(kept.place, kept.size)
        for file in kept.files.values():
            file.close()

    def close(self) -> None:
        for name in list(self._kept):
            self.drop(name)

    def facts(self) -> dict[str, Any]:
        """What a later run needs to know to use the files."""
        for kept in self._kept.values():
            for file in kept.files.values():
                file.flush()
        return {name: kept.facts() for name, kept in self._kept.items()}

    @classmethod
    def stored(cls, memory: Memory, folder: Path, facts: dict[str, Any]) -> Samples:
        """Those an earlier run left in ``folder``."""
        samples = cls(memory, folder)
        for name, known in facts.items():
            kept = _Kept("disk", 0, rows=known["rows"], width=known["width"], dtype=known["dtype"], adds=known["adds"])
            for end in kept_parts(kept.adds):
                kept.files[end] = (folder / file_name(name, end)).open("rb")
            samples._kept[name] = kept
        return samples


class Joining:
    """Makes one of the pieces of a site, and then of the next, whose responses take the place of the last one's."""

    def __init__(self) -> None:
        self._rooms = Room(), Room()  # of y and of the addend

    def __call__(self, pieces: Iterable[Piece], rows: int) -> Responses:
        """Pieces, in their order, as one, of about so many ``rows``. On the host each is written where it stays as it
        comes."""
        every = iter(pieces)
        first = next(every)[1]
        if first.y.device.type != "cpu":
            return joined([first, *(found for _, found in every)])
        y = Rows(rows, first.y.shape[1], first.y.dtype, self._rooms[0])
        addend = None
        if first.addend is not None:
            addend = Rows(rows, first.addend.shape[1], first.addend.dtype, self._rooms[1])
        for found in chain([first], (found for _, found in every)):
            y.add(found.y)
            if addend is not None and found.addend is not None:
                addend.add(found.addend)
        return Responses(y.found, None if addend is None else addend.found)


def joined(pieces: list[Responses]) -> Responses:
    """Pieces, in their order, as one."""
    addends = [found.addend for found in pieces if found.addend is not None]
    return Responses(torch.cat([found.y for found in pieces]), torch.cat(addends) if addends else None)


def file_name(name: str, end: str) -> str:
    """A layer's path as a file's name; layers may be called anything."""
    return f"{name.encode().hex() if not name.replace('.', '').replace('_', '').isalnum() else name}.{end}"


def kept_parts(adds: bool) -> tuple[str, ...]:
    return ("y", "addend") if adds else ("y",)
