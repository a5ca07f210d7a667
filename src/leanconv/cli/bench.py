"""``leanconv bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leanconv.cli import common
from leanconv.runtimes.runners import DTYPES, runtime_names

if TYPE_CHECKING:
    from leanconv.cli.networks import Opened

# Side of the images of a detector without --size; a detector resizes them itself.
DETECTOR_SIZE = 320

Other = Annotated[
    str | None,
    typer.Argument(
        help="A second network, such as the accelerated one. For a saved folder alone, the original is built by name."
    ),
]
Runtimes = Annotated[list[str] | None, typer.Option(help=f"{runtime_names()}; may be given several times.")]
Batches = Annotated[list[int] | None, typer.Option(min=1, help="Images a call (1); may be given several times.")]


def bench(
    model: common.Model,
    other: Other = None,
    *,
    runtime: Runtimes = None,
    batch: Batches = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads, for every runtime. Default: torch's.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}.")] = "float32",
    channels_last: Annotated[bool, typer.Option("--channels-last", help="torch: channels next to each other.")] = False,
    seconds: Annotated[float, typer.Option(help="Time to measure, for each runtime and batch size.")] = 5.0,
    layers: Annotated[bool, typer.Option("--layers", help="Also time every replaced layer, in torch.")] = False,
    network: common.NetworkOptions,
    size: common.Size = None,
    channels: common.Channels = None,
    device: common.Device = None,
    record: common.Record = False,
    as_json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Time a network, or the original and the accelerated one in turns, on this machine.

    Weights are random unless --weights says otherwise; they do not matter for time, except a detector's.

    Examples:

    leanconv bench vgg16 vgg16-4x --runtime torch --runtime onnxruntime --threads 1

    leanconv bench vgg16-4x --batch 1 --batch 32 --layers --json

    leanconv bench vgg16 vgg16-4x --record
    """
    import leanconv
    from leanconv.cli.networks import first_with_preprocessing
    from leanconv.network.torchvision_detectors import kind_of
    from leanconv.storage.records import write_record

    folder = common.folder_to_record([model] if other is None else [model, other]) if record else None
    place = common.pick_device(device)
    opened, notes = _networks(model, other, network)
    first = first_with_preprocessing(list(opened.values()))
    prepare = first.preprocess(common.ImageOptions(size=size, channels=channels))
    prepare = prepare.numbers() or prepare
    detectors = any(kind_of(each.model) is not None for each in opened.values())
    if detectors and notes:
        notes.append("the time of a detector depends on what it finds: give --weights for times that count")
    side = size or (DETECTOR_SIZE if detectors else prepare.size)
    times = leanconv.bench(
        {name: each.model for name, each in opened.items()},
        shape=(prepare.channels, side, side),
        runtimes=runtime or ["torch"],
        batches=batch or [1],
        device=place,
        threads=threads,
        dtype=dtype,
        channels_last=channels_last,
        seconds=seconds,
        layers=layers,
        notes=notes,
        progress=not quiet,
    )
    if folder is not None:
        write_record(folder, "bench", times.to_json())
    common.show(times, as_json)


def _networks(model: str, other: str | None, options: common.NetworkOptions) -> tuple[dict[str, Opened], list[str]]:
    """The networks by name, the original first, and notes about their weights."""
    from leanconv.cli.networks import open_network, open_together

    if other is None and common.is_saved(model):
        accelerated = open_network(model, options)
        name, first = _original(model, options.original)
        note = [f"{name} was built by name and has random weights"]
        return {name: first, model: accelerated}, note if options.original is None else []
    notes = []
    specs = [model] if other is None else [model, other]
    opened: dict[str, Opened] = {}
    networks = open_together(specs, options)
    for index, (spec, network) in enumerate(zip(specs, networks, strict=True)):
        name = spec if spec not in opened else f"{spec} (again)"
        opened[name] = network
        untrained = index > 0 or options.weights in (None, "none")
        if untrained and not common.is_saved(spec) and not spec.partition(":")[0].endswith(".py"):
            notes.append(f"{name} has random weights")
    return opened, notes


def _original(folder: str, by: str | None) -> tuple[str, Opened]:
    """The network a folder was made from, with random weights, and its name."""
    from leanconv.cli.networks import Opened, load_network
    from leanconv.network.source import Source, build
    from leanconv.storage.folder import read_description

    if by is not None:
        return by, Opened(load_network(by).model)
    source = Source.from_json(read_description(Path(folder))["source"])
    name = source.name if source.library == "torchvision" else f"{source.library}:{source.name}"
    return name, Opened(build(source))
