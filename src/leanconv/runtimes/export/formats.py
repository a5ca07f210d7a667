"""The formats. A new one is a module beside this and an entry in ``EXPORTERS``. Nothing here imports torch."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leanconv.errors import LeanconvError, listing, unknown_name
from leanconv.system.atomic_files import check_absent, check_name, check_parent


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """A format. The module of its name has ``prepare`` (the network and the example as the format takes them) and
    ``write`` (makes the file, and returns how to run it); ``program.export`` calls them."""

    name: str
    suffix: str
    help: str  # what runs its files
    title: str  # what a file is called in messages
    libraries: tuple[str, ...] = ()  # modules beside torch that writing needs
    extra: str | None = None  # pip install 'leanconv[EXTRA]' installs them
    per_device: bool = True  # a file is for one kind of device
    free_sizes: bool = True  # height and width can be free axes
    opset: int | None = None  # the usual one; None for a format that has none

    @property
    def module(self) -> Any:
        return importlib.import_module(f"{__package__}.{self.name}")


EXPORTERS = {
    exporter.name: exporter
    for exporter in (
        Exporter(
            name="onnx",
            suffix=".onnx",
            help="runs in onnxruntime, OpenVINO, TensorRT",
            title="the ONNX file",
            libraries=("onnx", "onnxscript"),
            extra="onnx",
            per_device=False,
            opset=18,
        ),
        Exporter(name="pt2", suffix=".pt2", help="torch.export, runs in plain torch", title="the .pt2 file"),
        Exporter(
            name="aot",
            suffix=".pt2",
            help="AOTInductor, compiled for this machine",
            title="the AOTInductor package",
            free_sizes=False,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Written:
    """What ``export`` wrote."""

    path: Path
    format: str
    input: tuple[int | str, ...]  # free axes by name
    dtype: str
    checked: tuple[tuple[int, ...], ...]  # shapes it was run on
    difference: float | None  # largest relative one from the network in torch; None where it was not checked
    opset: int | None = None

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"path": str(self.path), "bytes": self.path.stat().st_size}

    def __str__(self) -> str:
        opset = f", opset {self.opset}" if self.opset else ""
        text = f"{self.path}: {self.format}{opset}, {self.dtype}, takes {' x '.join(map(str, self.input))}"
        if self.difference is None:
            return f"{text}; not checked"
        shapes = f"on {len(self.checked)} shapes of input"
        return f"{text}\nlargest relative difference from torch {self.difference:.1e}, {shapes}"


def choose_exporter(
    path: str | Path, format: str | None, *, device: object = None, opset: int | None = None, prefix: str = ""
) -> Exporter:
    """The exporter of ``format``. Options it does not have, and a path where no new file can be, are refused.

    ``prefix``: before the names of arguments in messages, ``--`` on the command line.
    """
    path = Path(path)
    if format is None:
        format = next((name for name, exporter in EXPORTERS.items() if exporter.suffix == path.suffix), None)
        if format is None:
            known = listing(f"{exporter.suffix} ({name})" for name, exporter in EXPORTERS.items())
            raise LeanconvError(f"{str(path)!r} has none of the endings of exported files; use {known}.")
    if format not in EXPORTERS:
        raise unknown_name(format, EXPORTERS, what="format", where=f"{prefix}format")
    exporter = EXPORTERS[format]
    if device is not None and not exporter.per_device:
        raise LeanconvError(
            f"{prefix}device does not go with {prefix}format {format}, whose files are for any device; leave it out."
        )
    if opset is not None and exporter.opset is None:
        raise LeanconvError(f"{prefix}opset does not go with {prefix}format {format}, which has none; leave it out.")
    if path.suffix != exporter.suffix:
        raise LeanconvError(
            f"{str(path)!r} does not end in {exporter.suffix}, as a file of the format {format} does; change the name."
        )
    check_name(path, "file")
    check_absent(path)
    check_parent(path)
    return exporter
