"""``leanconv evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leanconv.cli import common as given
from leanconv.cli.json_output import print_json
from leanconv.cli.record import Record, folder_to_record
from leanconv.errors import LeanconvError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor, nn

    from leanconv.cli.networks import Opened
    from leanconv.evaluation.class_names import ClassIndices
    from leanconv.images import Picture, Preprocess

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
ClassFile = Annotated[Path | None, typer.Option(help="JSON: {class name: index} or {class name: [index, ...]}.")]
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
    model: given.Model,
    data: Data,
    other: Other = None,
    labels: Labels = None,
    classes: ClassFile = None,
    views: Views = 1,
    split: Split = None,
    metric: Metric = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most this many images, spread over all.")] = None,
    weights: given.Weights = None,
    num_classes: given.Classes = None,
    original: given.Original = None,
    size: given.Size = None,
    resize: given.Resize = None,
    channels: given.Channels = None,
    mean: given.Mean = None,
    std: given.Std = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images a batch (32; detectors 8).")] = None,
    workers: given.Workers = None,
    device: given.Device = None,
    record: Record = False,
    as_json: given.Json = False,
    quiet: given.Quiet = False,
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
    from leanconv.cli.evaluate_detector import Asked, evaluate_detectors
    from leanconv.evaluation.class_names import class_indices, labelled
    from leanconv.evaluation.classification import NAMELESS, accuracy
    from leanconv.evaluation.paired import compare
    from leanconv.images import TenViews, find_pictures, held_out
    from leanconv.images.loading import spread
    from leanconv.network.user_model import check_model
    from leanconv.storage.records import write_record

    if views not in (1, 10):
        raise LeanconvError(f"--views {views} is not known; use 1 or 10.")
    specs = [model] if other is None else [model, other]
    folder: Path | None = None
    if record:
        if other is None:
            raise LeanconvError(f"--record keeps what was lost; give the original network too, before {model!r}.")
        folder = folder_to_record(specs)
    networks = [
        _open(spec, specs, original, weights if number == 0 else None, num_classes) for number, spec in enumerate(specs)
    ]
    for network in networks:
        check_model(network.model)
    picturing = {"size": size, "resize": resize, "channels": channels, "mean": mean, "std": std}
    if _all_detectors(specs, networks):
        if given.processes() > 1:
            raise LeanconvError(
                f"detectors are measured in one process, and torchrun has started {given.processes()}; run leanconv "
                "evaluate by itself."
            )
        _refuse({**picturing, "labels": labels, "views": None if views == 1 else views}, "classifiers")
        asked = Asked(
            data=data,
            split=split,
            metric=metric or "voc",
            classes=classes,
            limit=limit,
            batch=batch or 8,
            workers=given.pick_workers(workers),
            device=given.pick_device(device),
            record=folder,
            as_json=as_json,
            quiet=quiet,
        )
        evaluate_detectors(specs, networks, asked)
        return
    _refuse({"split": split, "metric": metric}, "detectors")
    source = held_out(data)
    pictures = find_pictures(source)
    if labels is not None:
        pictures = labelled(pictures, labels)
    mapping = class_indices(pictures, classes)
    pictures = spread(pictures, limit or len(pictures))
    prepare = _preprocess(networks, specs, **picturing)
    batch = batch or 32
    named = [(spec if other else NAMELESS, network.model) for spec, network in zip(specs, networks, strict=True)]
    with given.team(device) as (place, lead):
        logits, truth, bad = _answers(
            named,
            pictures,
            mapping,
            place,
            prepare=TenViews(prepare) if views > 1 else prepare,
            together=max(1, batch // views),
            at_once=batch,
            workers=given.pick_workers(workers),
            quiet=quiet,
        )
    if not lead:
        return
    about = {"data": source, "views": views, "unreadable": bad}
    if other is not None:
        comparison = compare(logits[0], logits[1], truth, original=model, other=other)
        result = {**comparison.to_json(), **about}
        if folder is not None:
            write_record(folder, "evaluation", result)
        if as_json:
            print_json(result)
        else:
            print(comparison)
        return
    found = accuracy(logits[0], truth)
    if as_json:
        print_json({**vars(found), **about, "model": model})
    else:
        print(f"{model}: top-1 {100 * found.top1:.2f} %, top-5 {100 * found.top5:.2f} % of {found.images} images")


def _answers(
    networks: list[tuple[str, nn.Module]],
    pictures: Sequence[Picture],
    classes: ClassIndices,
    place: torch.device,
    *,
    prepare: Callable[[bytes], Tensor],
    together: int,
    at_once: int,
    workers: int,
    quiet: bool,
) -> tuple[list[Tensor], Tensor, list[str]]:
    """Outputs of every network, true classes and unreadable pictures: of all processes, in each of them. ``together``
    pictures are read at a time: all their views are no more than ``at_once``."""
    import torch

    from leanconv.calibrate.processes import Team
    from leanconv.evaluation.classification import answers
    from leanconv.images import stream
    from leanconv.images.loading import refuse_too_many
    from leanconv.progress import reporter

    team = Team(place)
    if len(pictures) < team.world:
        raise LeanconvError(f"there are {len(pictures)} images for {team.world} processes; use fewer processes.")
    # Not each so-manieth: what the processes find, one behind the other, is in the order of a process alone.
    first, last = (len(pictures) * number // team.world for number in (team.rank, team.rank + 1))
    bad: list[str] = []
    with team.ending_all():
        batches = stream(
            pictures[first:last],
            prepare,
            batch=together,
            workers=workers,
            pin=place.type == "cuda",
            out_of=len(pictures),
            bad=bad,
        )
        with reporter(not quiet and team.lead).stage("evaluating", -(-(last - first) // together)) as stage:
            mine = answers(networks, batches, classes, place, at_once=at_once, step=stage.advance)
        found = team.words((*mine, bad))
    every = [name for one in found for name in one[2]]
    refuse_too_many(every, len(pictures))
    logits = [torch.cat([one[0][number] for one in found]) for number in range(len(networks))]
    return logits, torch.cat([one[1] for one in found]), every


def _all_detectors(specs: list[str], networks: list[Opened]) -> bool:
    from leanconv.evaluation.detection import is_detector

    kinds = [is_detector(network.model) for network in networks]
    if len(set(kinds)) > 1:
        each = [f"{spec} is a {'detector' if kind else 'classifier'}" for spec, kind in zip(specs, kinds, strict=True)]
        raise LeanconvError(f"{' and '.join(each)}; give two of a kind.")
    return kinds[0]


def _refuse(options: dict[str, Any], kind: str) -> None:
    """Options that mean something for the other ``kind`` of network only."""
    for name, value in options.items():
        if value is not None:
            raise LeanconvError(f"--{name} is for {kind}, which MODEL is none of; leave it out.")


def _open(spec: str, specs: list[str], original: str | None, weights: str | None, classes: int | None) -> Opened:
    """A folder made from the user's own code is rebuilt by --model, or else by the network it is compared with."""
    from leanconv.cli.networks import open_network
    from leanconv.storage.folder import read_description

    base = original
    if not given.is_saved(spec):
        base = None if any(given.is_saved(one) for one in specs) else original
    elif original is None and read_description(Path(spec))["source"]["library"] == "other":
        base = next((one for one in specs if not given.is_saved(one)), None)
    return open_network(spec, base, weights, classes, default_weights="DEFAULT")


def _preprocess(networks: list[Opened], specs: list[str], **asked: Any) -> Preprocess:
    """Of the first network that has any of its own; networks that differ in theirs need the user's word."""
    own = [network for network in networks if network.preset is not None or network.remembered is not None]
    known = [network.preprocess(**asked).to_json(network.preset) for network in own]
    if any(one != known[0] for one in known) and all(value is None for value in asked.values()):
        raise LeanconvError(
            f"{' and '.join(specs)} were made for different preprocessing; give --size, --resize, --mean or --std for "
            "both."
        )
    return (own or networks)[0].preprocess(**asked)
