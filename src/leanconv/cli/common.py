"""Options several commands share, and what they are in the library."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from leanconv.cli.networks import is_saved, load_network
from leanconv.errors import LeanconvError

if TYPE_CHECKING:
    import torch

__all__ = ["is_saved", "load_network"]

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
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... Default: cuda if there is one.")]
Batch = Annotated[int, typer.Option(min=1, help="Images a batch.")]
Workers = Annotated[
    int | None, typer.Option(min=0, help="Processes that decode images. Default: as many as cores, at most 8.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Size = Annotated[int | None, typer.Option(min=1, help="Side of the square the network takes (224).")]
Resize = Annotated[int | None, typer.Option(min=1, help="Shorter side before the centre crop (size * 256 / 224).")]
Channels = Annotated[int | None, typer.Option(min=1, max=3, help="3 for colour (default), 1 for grey.")]
Mean = Annotated[str | None, typer.Option(help="Mean to subtract, R,G,B in 0..1 (ImageNet's).")]
Std = Annotated[str | None, typer.Option(help="Deviation to divide by, R,G,B in 0..1 (ImageNet's).")]


@contextmanager
def named_as_option(*arguments: str) -> Iterator[None]:
    """An error of the library that begins with the name of one of these arguments is about the option of that name."""
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


@contextmanager
def team(asked: str | None) -> Iterator[tuple[torch.device, bool]]:
    """This process's device, and whether it leads. Under torchrun, with the process group every process joins."""
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
        time.sleep(0.3)  # gloo's threads let go of what was exchanged last; while the interpreter ends, that aborts it


def pick_workers(asked: int | None) -> int:
    from leanconv.runtimes.bench.machine import cores

    return min(8, cores()) if asked is None else asked
