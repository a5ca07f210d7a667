"""``leanconv export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leanconv.cli import common as given
from leanconv.cli.json_output import print_json


def export(
    model: given.Model,
    out: Annotated[Path, typer.Option(help="New file: .onnx, or .pt2 for the formats pt2 and aot.")],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="onnx, pt2 (torch.export, runs in plain torch) or aot (AOTInductor, compiled for this machine).",
        ),
    ] = "onnx",
    opset: Annotated[int, typer.Option(help="Opset of an ONNX file, 17 or later.")] = 18,
    weights: given.Weights = None,
    num_classes: given.Classes = None,
    original: given.Original = None,
    size: given.Size = None,
    channels: given.Channels = None,
    device: Annotated[str | None, typer.Option(help="Device a pt2 or aot file is for. Default: cpu.")] = None,
    as_json: given.Json = False,
) -> None:
    """Write a network to one file that runs without leanconv, and check its answers.

    Examples:

    leanconv export vgg16-4x --format onnx --out vgg16-4x.onnx

    leanconv export vgg16-4x --format pt2 --out vgg16-4x.pt2
    """
    from leanconv.errors import LeanconvError, unknown_name
    from leanconv.runtimes.export.file_name import SUFFIXES, check_place

    if form not in SUFFIXES:
        raise unknown_name(form, SUFFIXES, what="format", where="--format")
    if form == "onnx" and device is not None:
        raise LeanconvError("--device does not go with --format onnx, whose files are for any device; leave it out.")
    check_place(out, form)

    import torch

    from leanconv.cli.networks import open_network
    from leanconv.runtimes.export.aot import write_aot
    from leanconv.runtimes.export.onnx import write_onnx
    from leanconv.runtimes.export.pt2 import write_pt2

    place = given.pick_device(device or "cpu")
    network = open_network(model, original, weights, num_classes, default_weights="DEFAULT")
    prepare = network.preprocess(size=size, resize=None, channels=channels, mean=None, std=None)
    prepare = prepare.numbers() or prepare
    example = torch.rand(1, prepare.channels, prepare.size, prepare.size, generator=torch.Generator().manual_seed(0))
    if form == "onnx":
        written = write_onnx(network.model, example, out, opset=opset)
    elif form == "pt2":
        written = write_pt2(network.model.to(place), example, out)
    else:
        written = write_aot(network.model, example, out, place)
    if as_json:
        print_json(written.to_json())
        return
    shape = " x ".join(map(str, written.input))
    opened = f", opset {written.opset}" if written.opset else ""
    print(f"{out}: {form}{opened}, {written.dtype}, takes {shape}")
    print(f"largest relative difference from torch {written.difference:.1e}, on {len(written.checked)} shapes of input")
