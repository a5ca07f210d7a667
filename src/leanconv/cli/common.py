"""What several commands share: options, what they are in the library, and how results are printed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leanconv.errors import LeanconvError
from leanconv.storage.records import check_recordable
from leanconv.system.threads import MOST, cores

if TYPE_CHECKING:
    import torch

Model = Annotated[
    str,
    typer.Argument(
        help="A torchvision builder (vgg16), timm:NAME, leanconv:NAME (spp10, vgg16_cifar, resnet20_cifar), "
        "file.py:callable, or a saved folder."
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(help="Weights by torchvision's name (DEFAULT), a .safetensors or .pth file, or 'none' (random)."),
]
Original = Annotated[
    str | None, typer.Option("--model", help="file.py:callable of the original, for a folder made from one.")
]
Classes = Annotated[
    int | None, typer.Option("--num-classes", min=1, help="Outputs of the network, if not its usual ones.")
]
Size = Annotated[int | None, typer.Option(min=1, help="Side of the square the network takes (224).")]
Resize = Annotated[int | None, typer.Option(min=1, help="Shorter side before the centre crop (size * 256 / 224).")]
Channels = Annotated[int | None, typer.Option(min=1, max=3, help="3 for colour (default), 1 for grey.")]
Mean = Annotated[str | None, typer.Option(help="Mean to subtract, R,G,B in 0..1 (ImageNet's).")]
Std = Annotated[str | None, typer.Option(help="Deviation to divide by, R,G,B in 0..1 (ImageNet's).")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... Default: cuda if there is one.")]
Batch = Annotated[int, typer.Option(min=1, help="Images a batch.")]
Workers = Annotated[
    int | None, typer.Option(min=0, help="Processes that decode images. Default: as many as cores, at most 8.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Workdir = Annotated[
    Path | None, typer.Option(help="Folder for the state of the run: started again, it goes on from there.")
]
NewFolder = Annotated[Path, typer.Option(help="Folder to write; must not exist.")]
Folders = Annotated[list[Path], typer.Argument(help="Saved folders, as accelerate --out writes them.")]
Threads = Annotated[
    int | None, typer.Option(min=1, max=MOST, help="CPU threads. Default: as many as there are idle cores.")
]
ClassFile = Annotated[Path | None, typer.Option(help="JSON: {class name: index} or {class name: [index, ...]}.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use at most this many images, spread over all.")]
Record = Annotated[
    bool,
    typer.Option("--record", help="Keep the figures in the saved folder, for leanconv compare and leanconv report."),
]


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """How MODEL is built."""

    weights: Weights = None
    num_classes: Classes = None
    original: Original = None


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """How images are preprocessed, where that is not known or shall be changed."""

    size: Size = None
    resize: Resize = None
    channels: Channels = None
    mean: Mean = None
    std: Std = None


def is_saved(model: str) -> bool:
    """Whether MODEL is a folder ``result.save`` may have written."""
    return Path(model).is_dir()


@contextlib.contextmanager
def named_as_option(*arguments: str) -> Iterator[None]:
    """Errors of the library about one of these arguments name the option: ``views=...`` becomes ``--views=...``."""
    try:
        yield
    except LeanconvError as error:
        if str(error).replace("=", " ").split()[0] in arguments:
            raise LeanconvError(f"--{error}") from error
        raise


def pick_device(asked: str | None) -> torch.device:
    import torch

    from leanconv.network.user_model import parse_device

    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with named_as_option("device"):
        return parse_device(asked)


@contextlib.contextmanager
def team(asked: str | None) -> Iterator[tuple[torch.device, bool]]:
    """This process's device, and whether it is the first process. Under torchrun, with the process group of all."""
    if os.environ.get("WORLD_SIZE", "1") == "1":  # torchrun sets it
        yield pick_device(asked), True
        return
    import torch
    import torch.distributed as dist

    place = pick_device(asked)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield place, dist.get_rank() == 0
    finally:
        dist.destroy_process_group()
        time.sleep(0.3)  # gloo's threads free their last messages; if the interpreter ends meanwhile, it aborts


def pick_workers(asked: int | None) -> int:
    return min(8, cores()) if asked is None else asked


def refuse(options: Mapping[str, Any], why: str) -> None:
    """Raise an error about the first of these options that is not None."""
    for name, value in options.items():
        if value is not None:
            raise LeanconvError(f"--{name} {why}.")


def folder_to_record(specs: Sequence[str]) -> Path:
    """The saved folder for ``--record``: the last of ``specs``, after its original network if there are two."""
    *before, folder = specs
    if not is_saved(folder) or any(is_saved(original) for original in before):
        raise LeanconvError(
            "--record keeps figures of a saved folder against its original; give the original network first and the "
            f"folder second, not {' '.join(specs)!r}."
        )
    from leanconv.storage.folder import read_description

    read_description(Path(folder))
    check_recordable(Path(folder))
    return Path(folder)


@contextlib.contextmanager
def only_json(on: bool) -> Iterator[None]:
    """With ``on``, whatever else is printed (by a download, by the user's own file) goes to stderr."""
    global _stdout
    _stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if on else contextlib.nullcontext():
        yield


_stdout = sys.stdout


def quietly(on: bool) -> contextlib.AbstractContextManager[object]:
    """With ``on``, nothing is written to stderr, neither warnings nor the progress of a download; errors are raised."""
    return contextlib.redirect_stderr(io.StringIO()) if on else contextlib.nullcontext()


def print_json(data: Any) -> None:
    print(json.dumps(data), file=_stdout, flush=True)


def show(result: Any, as_json: bool) -> None:
    """Print a result as text, or its ``to_json()`` as one JSON object."""
    if as_json:
        print_json(result.to_json())
    else:
        print(result)
