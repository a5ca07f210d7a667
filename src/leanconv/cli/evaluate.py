"""``leanconv evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leanconv.cli import given
from leanconv.cli.output import print_json


def evaluate(
    model: given.Model,
    data: Annotated[Path, typer.Option(help="Folder with a folder a class, or a .tar of them.")],
    classes: Annotated[
        Path | None, typer.Option(help="JSON: {folder: class index} or {folder: [index, name]}.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most this many images, spread over all.")] = None,
    weights: given.Weights = None,
    num_classes: given.Classes = None,
    original: Annotated[
        str | None, typer.Option("--model", help="file.py:callable of the original, for a folder made from one.")
    ] = None,
    size: given.Size = None,
    resize: given.Resize = None,
    channels: given.Channels = None,
    mean: given.Mean = None,
    std: given.Std = None,
    batch: given.Batch = 32,
    workers: given.Workers = None,
    device: given.Device = None,
    as_json: given.Json = False,
    quiet: given.Quiet = False,
) -> None:
    """Measure top-1 and top-5 accuracy on labelled images.

    Examples:

    leanconv evaluate vgg16 --data imagenet/val

    leanconv evaluate vgg16-4x --data val.tar --json
    """
    from leanconv.cli.saved import open_network
    from leanconv.entrance import check_model
    from leanconv.evaluate.classification import accuracy, logits_and_labels
    from leanconv.evaluate.labels import class_indices
    from leanconv.images import find_pictures, stream
    from leanconv.images.batches import spread
    from leanconv.progress import reporter

    pictures = find_pictures(data)
    mapping = class_indices(pictures, classes)
    if limit:
        pictures = spread(pictures, limit)
    place = given.pick_device(device)
    network = open_network(model, original, weights, num_classes, default_weights="DEFAULT")
    check_model(network.model)
    prepare = network.preprocess(size=size, resize=resize, channels=channels, mean=mean, std=std)
    bad: list[str] = []
    batches = stream(pictures, prepare, batch=batch, workers=given.pick_workers(workers), bad=bad)
    with reporter(not quiet).stage("evaluating", -(-len(pictures) // batch)) as stage:
        logits, labels = logits_and_labels(network.model, batches, mapping, place, step=stage.advance)
    found = accuracy(logits, labels)
    if as_json:
        print_json({**vars(found), "unreadable": bad, "model": model})
    else:
        print(f"{model}: top-1 {100 * found.top1:.2f} %, top-5 {100 * found.top5:.2f} % of {found.images} images")
