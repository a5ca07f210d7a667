"""Memory a run may keep things in: on the device, on the host, on disk, each within a limit."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from torch import Tensor

from leanconv.errors import LeanconvError

Place = Literal["device", "host", "disk"]
PLACES: tuple[Place, ...] = ("device", "host", "disk")  # fastest first

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_memory(value: Any) -> int | None:
    """Bytes from ``memory=``: a number of them, or a text such as '8GB'. None stays None."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", value.upper()) if isinstance(value, str) else None
    if found is None or found[2] not in _UNITS or not float(found[1]):
        raise LeanconvError(f"memory={value!r} is no amount of memory; give bytes or a text such as '8GB'.")
    return int(float(found[1]) * _UNITS[found[2]])


def free_host() -> int:
    """Bytes the host can still give this process, a container's limit included."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        known = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(known["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no such group, or "max"
        pass
    return max(free, 0)


def device_share(device: torch.device, limit: int | None) -> int:
    """Bytes of a GPU's memory that may be kept: ``limit``, or half of what is free."""
    if device.type != "cuda":
        return 0
    return torch.cuda.mem_get_info(device)[0] // 2 if limit is None else limit


class Memory:
    """Counts the bytes that may still be kept on the device, on the host and on disk. ``folder``: for files; default
    the system's temporary folder, if that is on a disk. ``share``: ``device_share`` as it was, if something is being
    sent there already."""

    def __init__(self, device: torch.device, limit: int | None, folder: Path | None = None, share: int | None = None):
        self.device = device
        self.folder = folder if folder is not None else _disk_folder()
        # Processes torchrun has started on this machine share what is free.
        together = 2 * max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._free: dict[Place, int] = {"host": free_host() // together if limit is None else limit, "disk": 0}
        if device.type == "cuda":
            self._free["device"] = device_share(device, limit) if share is None else share
        if self.folder is not None:
            self._free["disk"] = shutil.disk_usage(self.folder).free // together
        self.file = _Scratch(self.folder) if self.folder is not None else None

    def reserve(self, size: int, *, share: float = 1.0, among: tuple[Place, ...] = PLACES) -> Place | None:
        """Where ``size`` bytes may be kept, fastest first; None if nowhere. They are at most a ``share`` of what is
        free."""
        for place in among:
            if size <= share * self._free.get(place, 0):
                self._free[place] -= size
                return place
        return None

    def release(self, place: Place, size: int) -> None:
        self._free[place] += size

    def take_back(self, place: Place, size: int) -> None:
        """Reserve what is there already, or was just released, without asking."""
        self._free[place] -= size

    def shrink(self, place: Place) -> None:
        """There is less than was counted: keep nothing more there."""
        self._free[place] = 0

    @property
    def fastest(self) -> Place:
        """Where the network runs."""
        return "device" if self.device.type == "cuda" else "host"


def _disk_folder() -> Path | None:
    """The temporary folder, unless it is in memory."""
    folder = Path(tempfile.gettempdir()).resolve()
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
        best = max((m for m in mounts if folder.is_relative_to(m[0])), key=lambda m: len(m[0]))
        return None if best[1] in ("tmpfs", "ramfs") else folder
    except (OSError, ValueError):
        return folder


def write_numbers(tensor: Tensor, file: IO[bytes]) -> None:
    """To an unbuffered ``file``, at its position. A full disk raises an OSError that says so; numpy's ``tofile`` would
    only count what it has written."""
    left = tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().data
    while left:
        left = left[file.write(left) :]


class _Scratch:
    """One file without a name, for many things: it goes when this process does, whatever ends it."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._end = 0
        self._spare: list[tuple[int, int]] = []  # offset, size

    def write(self, parts: list[Tensor]) -> tuple[int, int]:
        """Write tensors of bytes behind one another; returns their span, an offset and a size."""
        if self._file is None:
            # It lives as long as this object.
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
        size = sum(map(len, parts))
        span = next((span for span in self._spare if span[1] >= size), None)
        if span is None:
            span = (self._end, size)
            self._end += size
        else:
            self._spare.remove(span)
        self._file.seek(span[0])
        for part in parts:
            write_numbers(part, self._file)
        return span

    def read(self, span: tuple[int, int], sizes: Sequence[int]) -> list[Tensor]:
        assert self._file is not None
        self._file.seek(span[0])
        return [torch.from_numpy(np.fromfile(self._file, np.uint8, size)) for size in sizes]

    def free(self, span: tuple[int, int]) -> None:
        self._spare.append(span)


@dataclass
class Packed:
    """Tensors as the memory behind them and their views of it: two that share memory still do when unpacked."""

    storages: list[Tensor]  # bytes; none if they are in a file
    views: dict[int, tuple[int, torch.dtype, int, tuple[int, ...], tuple[int, ...]]]
    file: _Scratch | None = None
    span: tuple[int, int] = (0, 0)
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, env: dict[int, Tensor]) -> Packed:
        storages: dict[int, tuple[int, Tensor]] = {}
        views = {}
        for slot, tensor in env.items():
            storage = tensor.untyped_storage()
            key = storage.data_ptr() or -slot - 1  # empty tensors share nothing
            if key not in storages:
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                storages[key] = len(storages), flat
            index = storages[key][0]
            views[slot] = (index, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
        return cls([flat for _, flat in storages.values()], views)

    def moved(self, device: torch.device) -> Packed:
        """A copy on ``device``."""
        return Packed([flat.to(device, copy=True) for flat in self.storages], self.views)

    def written(self, file: _Scratch) -> Packed:
        """A copy on disk; ``forget`` when it is not needed any more."""
        return Packed([], self.views, file, file.write(self.storages), tuple(map(len, self.storages)))

    def forget(self) -> None:
        if self.file is not None:
            self.file.free(self.span)

    def unpacked(self, device: torch.device) -> dict[int, Tensor]:
        """New tensors on ``device``; what is packed stays as it is."""
        if self.file is None:
            storages = [flat.to(device, copy=True) for flat in self.storages]
        else:
            storages = [flat.to(device) for flat in self.file.read(self.span, self.sizes)]

        def view(index: int, dtype: torch.dtype, *layout: Any) -> Tensor:
            return torch.empty(0, dtype=dtype, device=device).set_(storages[index].untyped_storage(), *layout)

        return {slot: view(*form) for slot, form in self.views.items()}
