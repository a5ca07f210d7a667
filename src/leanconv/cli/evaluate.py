"""``leanconv evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leanconv.cli import common
from leanconv.errors import LeanconvError

Data = Annotated[
    str,
    typer.Option(
        help="Labelled images: a folder with a folder a class, a .tar of them, webdataset shards (a folder of .tar "
        "files or a pattern such as 'val-{000..003}.tar'), hf:NAME:SPLIT, or a flat folder with --labels. For "
        "detectors: a VOC folder, COCO's FILE.json[:FOLDER], or shards of id.jpg and id.json."
    ),
]
Other = Annotated[
    str | None, typer.Argument(help="A second network, such as the accelerated one, to compare with the first.")
]
Labels = Annotated[
    Path | None,
    typer.Option(help="Text file: a class index or name a line in order of the file names, or 'name class' lines."),
]
Split = Annotated[
    str | None, typer.Option(help="Detectors: which list of a VOC folder, or which shards. Default: val, if there.")
]
Metric = Annotated[
    str | None,
    typer.Option(help="Detectors: voc (mAP at IoU 0.5, default), voc11 (its mean at 11 recalls), coco (0.5 to 0.95)."),
]
Views = Annotated[
    int, typer.Option(help="1: the centre of each picture; 10: centre, corners and their mirror images, averaged.")
]


def evaluate(
    model: common.Model,
    data: Data,
    other: Other = None,
    *,
    labels: Labels = None,
    classes: common.ClassFile = None,
    views: Views = 1,
    split: Split = None,
    metric: Metric = None,
    limit: common.Limit = None,
    network: common.NetworkOptions,
    preprocessing: common.ImageOptions,
    batch: Annotated[int | None, typer.Option(min=1, help="Images a batch (32; detectors 8).")] = None,
    workers: common.Workers = None,
    device: common.Device = None,
    record: common.Record = False,
    as_json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Measure top-1 and top-5 accuracy on labelled images, or a detector's mAP on annotated ones, of one network or of
    two side by side.

    --weights belong to MODEL. Where data has folders train and val, val is used.

    Examples:

    leanconv evaluate vgg16 --data imagenet/val

    leanconv evaluate vgg16 vgg16-4x --data 'val-{000..003}.tar' --views 10

    leanconv evaluate vgg16-4x --data ILSVRC2012_img_val --labels val.txt --json

    leanconv evaluate vgg16 vgg16-4x --data imagenet/val --record

    leanconv evaluate fasterrcnn_resnet50_fpn --data VOCdevkit/VOC2012

    torchrun --nproc-per-node 4 -m leanconv evaluate vgg16 vgg16-4x --data imagenet/val
    """
    import leanconv
    from leanconv.cli.networks import open_together, preprocess_together
    from leanconv.evaluation.detection import are_detectors
    from leanconv.storage.records import write_record

    specs = [model] if other is None else [model, other]
    if record and other is None:
        raise LeanconvError(f"--record keeps what was lost; give the original network too, before {model!r}.")
    folder = common.folder_to_record(specs) if record else None
    networks = open_together(specs, network, default_weights="DEFAULT")
    categories = prepare = None
    if are_detectors([(spec, opened.model) for spec, opened in zip(specs, networks, strict=True)]):
        common.refuse(vars(preprocessing), "is for classifiers, which MODEL is none of; leave it out")
        categories = _categories([opened.preset for opened in networks])
    else:
        prepare = preprocess_together(networks, specs, preprocessing)
    with common.team(device) as (place, lead), common.named_as_option("views", "labels", "split", "metric"):
        found = leanconv.evaluate(
            networks[0].model,
            data,
            None if other is None else networks[1].model,
            names=specs,
            preprocess=prepare,
            labels=labels,
            classes=classes,
            categories=categories,
            views=views,
            split=split,
            metric=metric,
            limit=limit,
            batch=batch,
            workers=common.pick_workers(workers),
            device=place,
            progress=not quiet,
        )
    if not lead:
        return
    if folder is not None:
        write_record(folder, "evaluation", found.to_json())
    common.show(found, as_json)


def _categories(presets: list[str | None]) -> list[str] | None:
    """What the labels of a detector's trained weights are called, from 0, by the first weights that say it."""
    import torchvision

    known = [torchvision.models.get_weight(preset).meta.get("categories") for preset in presets if preset is not None]
    return next((names for names in known if names), None)
