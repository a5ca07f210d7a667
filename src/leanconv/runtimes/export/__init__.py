"""A network as a file that runs without leanconv. A new format is a module here and an entry in ``EXPORTERS``."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanconv.errors import LeanconvError, listing, unknown_name
from leanconv.system.atomic_files import check_absent, check_name, check_parent

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """A format. The module of its name has ``prepare`` (the network and the example as the format takes them) and
    ``write`` (a file of them, and what that file answers); see ``program.write_file``, which calls them.

    Attributes:
        name: what users call it.
        suffix: how its files end.
        help: what runs them.
        title: what a file is called in messages.
        libraries: modules beside torch that writing needs.
        extra: ``pip install 'leanconv[EXTRA]'`` installs them; None where nothing is needed.
        per_device: whether a file is for one kind of device.
        free_sizes: whether height and width can be free axes.
        opset: the usual opset; None for a format that has none.
    """

    name: str
    suffix: str
    help: str
    title: str
    libraries: tuple[str, ...] = ()
    extra: str | None = None
    per_device: bool = True
    free_sizes: bool = True
    opset: int | None = None

    @property
    def module(self) -> Any:
        return importlib.import_module(f"{__name__}.{self.name}")


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
    """A file, and what is known about it.

    Attributes:
        path: where it is.
        format: its format.
        input: the shape it takes; free axes by name.
        dtype: what it computes in.
        checked: the shapes it was run on.
        difference: the largest relative difference from the network in torch; None where it was not checked.
        opset: of an ONNX file.
    """

    path: Path
    format: str
    input: tuple[int | str, ...]
    dtype: str
    checked: tuple[tuple[int, ...], ...]
    difference: float | None
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


def export(
    model: nn.Module,
    example: Tensor,
    path: str | Path,
    format: str | None = None,
    *,
    device: torch.device | str | None = None,
    opset: int | None = None,
    dynamic: bool = True,
    check: bool = True,
) -> Written:
    """Write ``model`` to one new file that runs without leanconv, and compare its answers with the network's in torch.

    Args:
        model: any network but a detector, whose number of boxes depends on the picture. It is not modified.
        example: a batch of images of the usual size.
        path: the new file. It appears once it is checked, or not at all.
        format: ``"onnx"``, ``"pt2"`` (``torch.export.load(path).module()`` runs it) or ``"aot"`` (compiled for one kind
            of machine, run by ``torch._inductor.aoti_load_package``; it takes contiguous images and does not check
            that they are). Default: the first of these whose files end like ``path``.
        device: what a pt2 or aot file is for. Default: where the network is.
        opset: of an ONNX file, 17 or later. Default: 18.
        dynamic: whether the batch and, where format and network allow, height and width are free axes. Without it all
            are those of ``example``.
        check: without it the file is not run, and only the batch is free: that a size is free shows in the check.

    An ONNX file computes in float32, whatever the network does: not every runtime has half-precision convolutions on
    every machine. Its input is called ``images``, a single output ``output``. The other formats keep the dtype.

    Examples:
        >>> import leanconv, tempfile, torch
        >>> network = leanconv.models.character_cnn().eval()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = leanconv.export(network, torch.rand(1, 1, 32, 32), f"{folder}/network.pt2")
        >>> file.format, file.input
        ('pt2', ('batch', 1, 32, 32))
    """
    exporter = choose_exporter(path, format, device=device, opset=opset)
    from leanconv.runtimes.export.program import write_file

    return write_file(exporter, model, example, Path(path), device, opset, dynamic, check)


def choose_exporter(
    path: str | Path, format: str | None, *, device: object = None, opset: int | None = None, prefix: str = ""
) -> Exporter:
    """The exporter of ``format``. What it cannot do, and a place that cannot take a new file, is refused.

    ``prefix``: what stands before the names of arguments in messages, ``--`` on the command line.
    """
    path = Path(path)
    if format is None:
        format = next((name for name, one in EXPORTERS.items() if one.suffix == path.suffix), None)
        if format is None:
            known = listing(f"{one.suffix} ({name})" for name, one in EXPORTERS.items())
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
