"""``leanconv finetune``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leanconv.cli import common as given
from leanconv.cli.json_output import print_json
from leanconv.cli.options import with_options_of
from leanconv.errors import LeanconvError, warn
from leanconv.system.fields import number_in
from leanconv.train.settings import ORIGINAL_ONLY, FinetuneConfig

if TYPE_CHECKING:
    from torch import nn

    from leanconv.result import Accelerated

Folder = Annotated[Path, typer.Argument(help="What leanconv accelerate wrote.")]
Data = Annotated[str, typer.Option(help="Images: a folder, with a folder a class if there are labels; .tar files.")]
Distill = Annotated[
    str | None,
    typer.Option(help="Train without labels, to answer as this network does: the original, named as MODEL elsewhere."),
]
Validation = Annotated[str | None, typer.Option(help="Images to judge by. Default: a share --holdout of the data.")]
ClassFile = Annotated[Path | None, typer.Option(help="JSON: {class name: index} or {class name: [index, ...]}.")]
Augment = Annotated[
    str, typer.Option(help="Crops of at least this share of the picture, above 0 to 1, mirrored half the time; or off.")
]
Work = Annotated[
    Path | None, typer.Option(help="Folder for the state of the run: started again, it goes on from there.")
]


@with_options_of(FinetuneConfig, before="workdir")
def finetune(
    folder: Folder,
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    distill: Distill = None,
    weights: given.Weights = None,
    num_classes: given.Classes = None,
    original: given.Original = None,
    validation: Validation = None,
    classes: ClassFile = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most this many images, spread over all.")] = None,
    augment: Augment = "0.5",
    workdir: Work = None,
    size: given.Size = None,
    resize: given.Resize = None,
    channels: given.Channels = None,
    mean: given.Mean = None,
    std: given.Std = None,
    workers: given.Workers = None,
    device: given.Device = None,
    as_json: given.Json = False,
    quiet: given.Quiet = False,
    **options: Any,
) -> None:
    """Train an accelerated network with labels, or without them from the original, and save the best of it.

    --weights belong to the original. Where data has folders train and val, val is what is judged by. Images are read
    as when the folder was made.

    Examples:

    leanconv finetune vgg16-4x --data imagenet --out vgg16-4x-tuned --workdir tuning

    leanconv finetune vgg16-4x --data photos/ --distill vgg16 --out vgg16-4x-tuned

    torchrun --nproc-per-node 4 -m leanconv finetune vgg16-4x --data imagenet --out vgg16-4x-tuned --batch 32
    """
    from dataclasses import replace

    from leanconv.cli.networks import opened
    from leanconv.evaluation.class_names import class_indices_of_both
    from leanconv.evaluation.classification import class_count
    from leanconv.images import find_pictures
    from leanconv.images.loading import PictureSet, spread
    from leanconv.network.torchvision_detectors import kind_of
    from leanconv.storage.folder import check_new
    from leanconv.train.finetune import finetune as run

    check_new(out)
    to_distill = {"weights": weights, "num-classes": num_classes, **{key: options[key] for key in ORIGINAL_ONLY}}
    for name, value in to_distill.items():
        if distill is None and value is not None:
            raise LeanconvError(f"--{name} goes with --distill ORIGINAL, which is not given.")
    FinetuneConfig(distill=distill is not None, **options)  # checked before minutes are spent on loading
    smallest = _smallest(augment)
    if distill is not None and classes is not None:
        raise LeanconvError("--classes does not go with --distill, which trains without labels; give one of them.")
    source, judged_by = _parts(data, validation)
    pictures = find_pictures(source)
    held = None if judged_by is None else find_pictures(judged_by)
    mapping = class_indices_of_both(pictures, held, classes) if distill is None else None
    pictures = spread(pictures, limit or len(pictures))
    with given.team(device) as (place, lead):
        result, teacher = _networks(folder, distill, original, weights, num_classes)
        if kind_of(result.model) is not None:
            raise LeanconvError(
                f"{str(folder)!r} is a detector, and finetune trains classifiers; train it as detectors are trained."
            )
        network = opened(result)
        prepare = network.preprocess(size=size, resize=resize, channels=channels, mean=mean, std=std)
        examples = PictureSet(pictures, prepare, mapping, smallest)
        if mapping is not None:
            mapping.check(class_count(network.model, examples.unchanged()))
        tuned = run(
            result,
            examples,
            teacher,
            validation=None if held is None else PictureSet(held, prepare, mapping),
            workdir=workdir,
            device=place,
            workers=given.pick_workers(workers),
            progress=not quiet,
            **options,
        )
        if not lead:
            return
        assert tuned.result is not None
        replace(tuned.result, preprocess=prepare.to_json(network.preset)).save(out)
    history = tuned.history
    if history.stopped is not None:
        warn(history.stopped)
    if as_json:
        facts = {"verdict": history.verdict(), "stopped": history.stopped, "unreadable": history.unreadable}
        print_json({"folder": str(out), **facts, **(tuned.result.training or {})})
    else:
        print(f"{history.table()}\n{history.verdict()}\nsaved to {out}")


def _smallest(text: str) -> float | None:
    try:
        return None if text == "off" else number_in("augment", float(text), above=0, at_most=1)
    except ValueError:
        raise LeanconvError(f"--augment {text!r} must be a number above 0 and at most 1, or off.") from None


def _parts(data: str, validation: str | None) -> tuple[str, str | None]:
    """What to train on and what to judge by."""
    from leanconv.images import held_out
    from leanconv.images.find import TRAINING

    judged_by = held_out(data)
    return (data, validation) if judged_by == data else (str(Path(data) / TRAINING), validation or judged_by)


def _networks(
    folder: Path, distill: str | None, original: str | None, weights: str | None, classes: int | None
) -> tuple[Accelerated, nn.Module | None]:
    """The saved result, and the original to learn from; that rebuilds the result too where leanconv cannot."""
    from leanconv.cli.networks import open_network
    from leanconv.storage.folder import load_result, read_description

    built_by_us = read_description(folder)["source"]["library"] != "other"
    teacher = None
    if distill is not None:
        own = original if given.is_saved(distill) else None
        teacher = open_network(distill, own, weights, classes, default_weights="DEFAULT").model
    base = None if built_by_us else teacher
    if original is not None:
        base = given.load_network(original, "none", None, default_weights="none").model
    return load_result(folder, base), teacher
