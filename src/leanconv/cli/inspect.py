"""``leanconv inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from leanconv.cli import common


def inspect(
    model: common.Model,
    *,
    images: Annotated[
        Path | None, typer.Option(help="Images to measure sparsity on (zeros behind each activation).")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Use at most this many images.")] = 64,
    layers: Annotated[str, typer.Option(help="conv, or all to include Linear layers.")] = "conv",
    network: common.NetworkOptions,
    preprocessing: common.ImageOptions,
    batch: common.Batch = 32,
    workers: common.Workers = None,
    device: common.Device = None,
    as_json: common.Json = False,
) -> None:
    """Show what a network is made of: filters, sizes and where the multiply-accumulates are.

    Examples:

    leanconv inspect vgg16

    leanconv inspect resnet50 --images photos/ --json
    """
    from leanconv.cli.networks import open_network
    from leanconv.errors import LeanconvError
    from leanconv.images import Pictures, WholePictures, find_pictures, spread
    from leanconv.network.torchvision_detectors import kind_of
    from leanconv.pipeline.inspection import inspect_network

    if layers not in ("conv", "all"):
        raise LeanconvError(f"--layers {layers!r} is not known; use conv or all.")
    place = common.pick_device(device)
    default_weights = "none" if images is None else "DEFAULT"
    opened = open_network(model, network, default_weights)
    prepare = opened.preprocess(preprocessing)
    batches: list[Any] | None = None
    if images is not None:
        pictures, processes = spread(find_pictures(images), count), common.pick_workers(workers)
        if kind_of(opened.model) is None:
            batches = list(Pictures(pictures, prepare, batch=batch, workers=processes))
        else:
            batches = list(WholePictures(pictures, batch=min(batch, 8), workers=processes))
    shape = (1, prepare.channels, prepare.size, prepare.size)
    found = inspect_network(opened.model, batches, shape=shape, layers=layers, device=place)  # type: ignore[arg-type]
    common.show(found, as_json)
