"""``leanconv export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leanconv.cli import common
from leanconv.runtimes.export.formats import EXPORTERS, choose_exporter

FORMATS = "; ".join(f"{name}: {one.help}" for name, one in EXPORTERS.items())
SUFFIXES = ", ".join(f"{one.suffix} for {name}" for name, one in EXPORTERS.items())


def export(
    model: common.Model,
    out: Annotated[Path, typer.Option(help=f"New file: {SUFFIXES}.")],
    *,
    form: Annotated[
        str | None, typer.Option("--format", help=f"{FORMATS}. Default: the first that ends like --out.")
    ] = None,
    opset: Annotated[int | None, typer.Option(help="Opset of an ONNX file, 17 or later. Default: 18.")] = None,
    network: common.NetworkOptions,
    size: common.Size = None,
    channels: common.Channels = None,
    device: Annotated[str | None, typer.Option(help="Device a pt2 or aot file is for. Default: cpu.")] = None,
    as_json: common.Json = False,
) -> None:
    """Write a network to one file that runs without leanconv, and check its answers.

    Examples:

    leanconv export vgg16-4x --out vgg16-4x.onnx

    leanconv export vgg16-4x --format aot --out vgg16-4x.pt2
    """
    exporter = choose_exporter(out, form, device=device, opset=opset, prefix="--")

    import torch

    import leanconv
    from leanconv.cli.networks import open_network

    place = common.pick_device(device or "cpu") if exporter.per_device else None
    opened = open_network(model, network, default_weights="DEFAULT")
    prepare = opened.preprocess(common.ImageOptions(size=size, channels=channels))
    prepare = prepare.numbers() or prepare
    example = torch.rand(1, prepare.channels, prepare.size, prepare.size, generator=torch.Generator().manual_seed(0))
    written = leanconv.export(opened.model, example, out, format=exporter.name, device=place, opset=opset)
    common.show(written, as_json)
