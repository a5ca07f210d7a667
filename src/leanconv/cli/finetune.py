"""``leanconv finetune``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leanconv.cli import common
from leanconv.cli.options import OptionsOf
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
Augment = Annotated[
    str, typer.Option(help="Crops of at least this share of the picture, above 0 to 1, mirrored half the time; or off.")
]


def finetune(
    folder: Folder,
    data: Data,
    out: common.NewFolder,
    *,
    distill: Distill = None,
    network: common.NetworkOptions,
    validation: Validation = None,
    classes: common.ClassFile = None,
    limit: common.Limit = None,
    augment: Augment = "0.5",
    options: Annotated[dict[str, Any], OptionsOf(FinetuneConfig)],
    workdir: common.Workdir = None,
    preprocessing: common.ImageOptions,
    workers: common.Workers = None,
    device: common.Device = None,
    as_json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Train an accelerated network with labels, or without them from the original, and save the best of it.

    --weights belong to the original. Where data has folders train and val, val is what is judged by. Images are read
    as when the folder was made.

    Examples:

    leanconv finetune vgg16-4x --data imagenet --out vgg16-4x-tuned --workdir tuning

    leanconv finetune vgg16-4x --data photos/ --distill vgg16 --out vgg16-4x-tuned

    torchrun --nproc-per-node 4 -m leanconv finetune vgg16-4x --data imagenet --out vgg16-4x-tuned --batch 32
    """
    from leanconv.cli.networks import opened
    from leanconv.evaluation.class_names import class_indices_of_both
    from leanconv.evaluation.classification import class_count
    from leanconv.images import find_pictures, held_out, spread
    from leanconv.images.find import TRAINING
    from leanconv.images.loading import PictureSet
    from leanconv.network.torchvision_detectors import kind_of
    from leanconv.storage.folder import check_new
    from leanconv.train.finetune import finetune as run

    check_new(out)
    if distill is None:
        of_original = {"weights": network.weights, "num-classes": network.num_classes}
        of_original |= {name: options[name] for name in ORIGINAL_ONLY}
        common.refuse(of_original, "goes with --distill ORIGINAL, which is not given")
    FinetuneConfig(distill=distill is not None, **options)  # checked before minutes are spent on loading
    smallest = _smallest(augment)
    if distill is not None and classes is not None:
        raise LeanconvError("--classes does not go with --distill, which trains without labels; give one of them.")
    training = data
    if held_out(data) != data:
        training, validation = str(Path(data) / TRAINING), validation or held_out(data)
    pictures = find_pictures(training)
    held = None if validation is None else find_pictures(validation)
    mapping = class_indices_of_both(pictures, held, classes) if distill is None else None
    pictures = spread(pictures, limit or len(pictures))
    with common.team(device) as (place, lead):
        result, teacher = _networks(folder, distill, network)
        if kind_of(result.model) is not None:
            raise LeanconvError(
                f"{str(folder)!r} is a detector, and finetune trains classifiers; train it as detectors are trained."
            )
        saved = opened(result)
        prepare = saved.preprocess(preprocessing)
        examples = PictureSet(pictures, prepare, mapping, smallest)
        if mapping is not None:
            mapping.check(class_count(saved.model, examples.unchanged()))
        tuned = run(
            result,
            examples,
            teacher,
            validation=None if held is None else PictureSet(held, prepare, mapping),
            workdir=workdir,
            device=place,
            workers=common.pick_workers(workers),
            progress=not quiet,
            **options,
        )
        if not lead:
            return
        assert tuned.result is not None
        replace(tuned.result, preprocess=prepare.to_json(saved.preset)).save(out)
    history = tuned.history
    if history.stopped is not None:
        warn(history.stopped)
    if as_json:
        facts = {"verdict": history.verdict(), "stopped": history.stopped, "unreadable": history.unreadable}
        common.print_json({"folder": str(out), **facts, **(tuned.result.training or {})})
    else:
        print(f"{history.table()}\n{history.verdict()}\nsaved to {out}")


def _smallest(text: str) -> float | None:
    try:
        return None if text == "off" else number_in("augment", float(text), above=0, at_most=1)
    except ValueError:
        raise LeanconvError(f"--augment {text!r} must be a number above 0 and at most 1, or off.") from None


def _networks(
    folder: Path, distill: str | None, options: common.NetworkOptions
) -> tuple[Accelerated, nn.Module | None]:
    """The saved result, and the original to distill from. A result of the user's own code is rebuilt on --model, or
    else on that original."""
    from leanconv.cli.networks import load_network, open_network
    from leanconv.storage.folder import load_result, read_description

    own_code = read_description(folder)["source"]["library"] == "other"
    teacher = base = None
    if distill is not None:
        of_teacher = options if common.is_saved(distill) else replace(options, original=None)
        teacher = open_network(distill, of_teacher, default_weights="DEFAULT").model
    if options.original is not None:
        base = load_network(options.original).model
    elif own_code:
        base = teacher
    return load_result(folder, base), teacher
