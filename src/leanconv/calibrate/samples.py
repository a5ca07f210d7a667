"""Sampled responses of many sites, kept on the device, on the host or in files until they are needed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from leanconv.calibrate.memory import Memory, Place, write_numbers
from leanconv.calibrate.probes import Probe, Responses
from leanconv.errors import LeanconvError

# The largest share of free memory for the responses of one site: the frontiers need memory too.
SHARE = 0.5

Piece = tuple[int, Responses]  # with the index of its first image


class Table(Protocol):
    """Rows that come piece by piece."""

    def add(self, piece: Tensor) -> None: ...

    def all(self) -> Tensor:
        """The rows so far, as one tensor."""


class Pieces:
    """A table on the device."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []

    def add(self, piece: Tensor) -> None:
        self._pieces.append(piece)

    def all(self) -> Tensor:
        return torch.cat(self._pieces)


class Rows:
    """A table on the host, rows x ``width``, in memory for about so many ``rows``; more is taken if more rows come."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype):
        self._array = torch.empty(rows, width, dtype=dtype)
        self._count = 0

    def add(self, piece: Tensor) -> None:
        begin, end = self._count, self._count + len(piece)
        if end > len(self._array):
            more = self._array.new_empty(2 * end, piece.shape[1])
            more[:begin] = self.all()
            self._array = more
        self._array[begin:end] = piece
        self._count = end

    def all(self) -> Tensor:
        return self._array[: self._count]


class RowsOnDisk:
    """A table in an unbuffered file."""

    def __init__(self, file: IO[bytes], width: int, dtype: str, rows: int = 0):
        self.file, self._width, self._dtype, self._rows = file, width, dtype, rows

    def add(self, piece: Tensor) -> None:
        write_numbers(piece, self.file)
        self._rows += len(piece)

    def all(self) -> Tensor:
        self.file.seek(0)
        numbers = np.fromfile(self.file, self._dtype, self._rows * self._width)
        if len(numbers) != self._rows * self._width:
            raise LeanconvError(
                f"{getattr(self.file, 'name', 'a file')!r} is shorter than it was written; delete the workdir."
            )
        return torch.from_numpy(numbers).reshape(self._rows, self._width)


@dataclass
class _Kept:
    """The responses of a site: tables of ``y`` and, if it adds, of ``addend``. ``size``: bytes reserved for them."""

    place: Place
    size: int
    facts: dict[str, Any]  # rows, width, dtype, adds
    tables: dict[str, Table]


class Samples:
    """``folder``: keep everything there, to be used by later runs; else in ``memory``, in unnamed files at last."""

    def __init__(self, memory: Memory, folder: Path | None = None):
        self._memory, self._folder = memory, folder
        self._kept: dict[str, _Kept] = {}

    def expect(self, probe: Probe, rows: int, *, adds: bool) -> None:
        """About ``rows`` responses of a probe will come, and as many addends if its site ``adds``."""
        name, width, dtype = probe.site.name, probe.width, probe.weight.dtype
        size = rows * width * dtype.itemsize * (2 if adds else 1)
        place: Place | None = "disk"
        if self._folder is None:
            place = self._memory.reserve(size, share=SHARE) or self._memory.reserve(size)
        if place is None:
            raise LeanconvError(
                f"the sampled responses of layer {name!r} ({size / 1e6:.0f} MB) fit neither in memory nor on disk; "
                "give more memory, a workdir with room, or fewer samples."
            )
        facts: dict[str, Any] = {"rows": 0, "width": width, "dtype": str(dtype).removeprefix("torch."), "adds": adds}
        tables: dict[str, Table] = {}
        for part in _parts(adds):
            if place == "device":
                tables[part] = Pieces()
            elif place == "host":
                tables[part] = Rows(rows, width, dtype)
            else:
                tables[part] = RowsOnDisk(self._new_file(name, part), width, facts["dtype"])
        self._kept[name] = _Kept(place, 0 if self._folder else size, facts, tables)

    def _new_file(self, name: str, part: str) -> IO[bytes]:
        if self._folder is None:
            return tempfile.TemporaryFile(dir=self._memory.folder, buffering=0)
        return (self._folder / _file_name(name, part)).open("w+b", buffering=0)

    def add(self, name: str, responses: Responses) -> None:
        kept = self._kept[name]
        kept.facts["rows"] += len(responses.y)
        for part, tensor in (("y", responses.y), ("addend", responses.addend)):
            if tensor is not None:
                kept.tables[part].add(tensor)

    def get(self, name: str) -> Responses:
        """All responses of a site, in the order of the images."""
        return Responses(*(table.all().to(self._memory.device) for table in self._kept[name].tables.values()))

    def drop(self, name: str) -> None:
        kept = self._kept.pop(name, None)
        if kept is None:
            return
        if kept.size:
            self._memory.release(kept.place, kept.size)
        for table in kept.tables.values():
            if isinstance(table, RowsOnDisk):
                table.file.close()

    def close(self) -> None:
        for name in list(self._kept):
            self.drop(name)

    def facts(self) -> dict[str, Any]:
        """What a later run needs to know to use the files."""
        return {name: kept.facts for name, kept in self._kept.items()}

    @classmethod
    def stored(cls, memory: Memory, folder: Path, facts: dict[str, Any]) -> Samples:
        """Those an earlier run left in ``folder``."""
        samples = cls(memory, folder)
        for name, known in facts.items():
            files = {part: (folder / _file_name(name, part)).open("rb", buffering=0) for part in _parts(known["adds"])}
            form = known["width"], known["dtype"], known["rows"]
            samples._kept[name] = _Kept("disk", 0, known, {part: RowsOnDisk(files[part], *form) for part in files})
        return samples


def join_pieces(pieces: Iterable[Piece], rows: int) -> Responses:
    """Pieces, in their order, as one, of about so many ``rows``. On the host each is copied there as it comes."""
    every = (responses for _, responses in pieces)
    first = next(every)
    on_host = first.y.device.type == "cpu"
    tables: list[Table] = [
        Rows(rows, part.shape[1], part.dtype) if on_host else Pieces()
        for part in (first.y, first.addend)
        if part is not None
    ]
    for responses in chain([first], every):
        for table, part in zip(tables, (responses.y, responses.addend), strict=False):
            if part is not None:
                table.add(part)
    return Responses(*(table.all() for table in tables))


def _file_name(name: str, part: str) -> str:
    """A layer's path as a file's name; layers may be called anything."""
    return f"{name.encode().hex() if not name.replace('.', '').replace('_', '').isalnum() else name}.{part}"


def _parts(adds: bool) -> tuple[str, ...]:
    return ("y", "addend") if adds else ("y",)
