"""``leanconv accelerate``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from leanconv.cli import common as given
from leanconv.cli.json_output import print_json, quietly
from leanconv.cli.options import help_of, with_options_of
from leanconv.config import Options
from leanconv.errors import LeanconvError, listing
from leanconv.runtimes.runners import RUNTIMES, runtime_names

OTHERWISE = (
    "asymmetric",
    "ranks",
    "skip",
    "samples",
    "target",
    "refine",
)  # options that are spelled in another way here


@with_options_of(Options, before="symmetric", skip=OTHERWISE)
def accelerate(
    model: given.Model,
    images: Annotated[
        str,
        typer.Option(
            help="Images, labelled or not: a folder, .tar files (also 'calib-{00..03}.tar'), or hf:NAME:SPLIT."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    refine: Annotated[str | None, typer.Option(help=help_of(Options, "refine"))] = None,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Fit every layer to the exact input.")] = False,
    ranks: Annotated[str, typer.Option(help=help_of(Options, "ranks"))] = "energy",
    runtime: Annotated[
        str | None, typer.Option(help=f"--ranks latency: what is timed, {runtime_names(timeable=True)}.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="--ranks latency: CPU threads of that runtime (1).")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="--ranks latency: float32 (default), bfloat16 or float16.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help=help_of(Options, "skip"))] = None,
    no_skip: Annotated[bool, typer.Option("--no-skip", help="Leave no layer alone, not even the first.")] = False,
    count: Annotated[int, typer.Option(min=1, help="Use at most this many images, spread over all.")] = 1000,
    samples: Annotated[str, typer.Option(help=help_of(Options, "samples"))] = "50000",
    workdir: Annotated[
        Path | None, typer.Option(help="Folder for the state of the run: started again, it goes on from there.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="What the run may keep in memory, e.g. 8GB. Default: half of what is free.")
    ] = None,
    weights: given.Weights = None,
    num_classes: given.Classes = None,
    size: given.Size = None,
    resize: given.Resize = None,
    channels: given.Channels = None,
    mean: given.Mean = None,
    std: given.Std = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Images a batch (32; detectors 8); with --ranks latency: images a timed call (1)."),
    ] = None,
    workers: given.Workers = None,
    device: given.Device = None,
    report: Annotated[bool, typer.Option("--report", help="Also write a page about it, OUT/report.html.")] = False,
    as_json: given.Json = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print the result and errors, no progress and no warnings.")
    ] = False,
    **options: Any,
) -> None:
    """Accelerate a network and save it.

    Examples:

    leanconv accelerate vgg16 --images photos/ --speedup 4 --out vgg16-4x

    leanconv accelerate vgg16 --images photos/ --ranks latency --runtime onnxruntime --threads 1 --out vgg16-fast

    leanconv accelerate fasterrcnn_resnet50_fpn --images photos/ --count 300 --part backbone --out detector-4x

    leanconv accelerate net.py:build --weights net.safetensors --images calib.tar --out net-3x --speedup 3

    torchrun --nproc-per-node 4 -m leanconv accelerate vgg16 --images photos/ --out vgg16-4x --workdir work
    """
    from dataclasses import replace

    from leanconv.api import accelerate_as
    from leanconv.calibrate.memory import parse_memory
    from leanconv.images import Pictures, Preprocess, find_pictures
    from leanconv.images.loading import WholePictures, spread
    from leanconv.network.source import confirmed
    from leanconv.network.torchvision_detectors import kind_of
    from leanconv.pipeline.session import Session
    from leanconv.report import REPORT, check_report, write_report
    from leanconv.storage.folder import check_new
    from leanconv.train.history import History

    if skip and no_skip:
        raise LeanconvError("--skip and --no-skip contradict each other; give one of them.")
    if given.is_saved(model):
        raise LeanconvError(f"MODEL {model!r} is a folder; accelerate takes the original network, not a saved one.")
    chosen = _ranks(ranks)
    wanted: dict[str, Any] = {
        **options,
        "refine": refine,
        "asymmetric": not symmetric,
        "ranks": chosen,
        "skip": [] if no_skip else skip or None,
        "samples": _samples(samples),
        "target": _target(chosen, runtime=runtime, threads=threads, dtype=dtype, batch=batch, device=device),
    }
    if wanted["target"] is not None:
        batch = None  # that of the target
    asked = Options.check(**wanted)  # before minutes are spent on loading
    parse_memory(memory)
    check_new(out)
    if report:
        check_report(out / REPORT)
    pictures = spread(find_pictures(images), count)
    with quietly(quiet), given.team(device) as (place, lead):
        network = given.load_network(model, weights, num_classes, default_weights="DEFAULT")
        hands = given.pick_workers(workers)
        prepare: Preprocess | None = None
        batches: Pictures | WholePictures
        if kind_of(network.model) is None:
            prepare = network.preprocess(size=size, resize=resize, channels=channels, mean=mean, std=std)
            batches = Pictures(pictures, prepare, batch=batch or 32, workers=hands, pin=place.type == "cuda")
        else:
            _check_detector({"--size": size, "--resize": resize, "--channels": channels, "--mean": mean, "--std": std})
            batches = WholePictures(pictures, batch=batch or 8, workers=hands)
        limit = parse_memory(memory)
        session = Session(network.model, place, asked.seed, progress=not quiet, workdir=workdir, limit=limit)
        result = accelerate_as(network.model, batches, asked, session)
        if not lead:
            return
        assert network.source is not None
        source = confirmed(network.model, result.source, network.source)
        preprocess = None if prepare is None else prepare.to_json(network.preset)
        result = replace(result, source=source, preprocess=preprocess, command=_command())
        result.save(out)
        page = write_report(out) if report else None
    if as_json:
        print_json({**result.to_json(), "folder": str(out), "unreadable": batches.unreadable, **_at(page)})
    else:
        print(result)
        if result.training is not None:
            history = History.from_json(result.training["history"])
            print(*filter(None, [history.stopped, f"distilled: {history.verdict()}"]), sep="\n")
        if quiet and batches.unreadable:  # else there were warnings
            print(f"left out, as they cannot be read: {listing(batches.unreadable)}")
        needed = ", model=..." if result.source.library == "other" else ""
        print(f"saved to {out}; use it: leanconv.load({str(out)!r}{needed})")
        if page is not None:
            print(f"report: {page}, open it in a browser")


def _check_detector(asked: dict[str, Any]) -> None:
    for option, value in asked.items():
        if value is not None:
            raise LeanconvError(f"{option} does not go with a detector, which resizes and normalises images itself.")


def _command() -> list[str]:
    """What was typed, with the start of several processes where there were some."""
    together = os.environ.get("LOCAL_WORLD_SIZE", "1")
    start = ["leanconv"] if together == "1" else ["torchrun", "--nproc-per-node", together, "-m", "leanconv"]
    return [*start, *sys.argv[1:]]


def _at(page: Path | None) -> dict[str, str]:
    return {} if page is None else {"report": str(page)}


def _target(
    ranks: Any, *, runtime: str | None, threads: int | None, dtype: str | None, batch: int | None, device: str | None
) -> dict[str, Any] | None:
    """What --ranks latency times, torch where the network is computed; None for other ranks."""
    asked: dict[str, Any] = {"runtime": runtime, "threads": threads, "dtype": dtype}
    if ranks != "latency":
        for name, value in asked.items():
            if value is not None:
                raise LeanconvError(f"--{name} goes with --ranks latency only; leave it out or give that.")
        return None
    asked["batch"] = batch
    if runtime is None or (runtime in RUNTIMES and RUNTIMES[runtime].device is None):
        asked["device"] = str(given.pick_device(device))
    return {name: value for name, value in asked.items() if value is not None}


def _samples(text: str) -> Any:
    """A number, or the word as it is."""
    try:
        return int(text)
    except ValueError:
        return text


def _ranks(text: str) -> Any:
    """A method's name as it is, or ranks by hand from JSON."""
    if text.endswith(".json"):
        try:
            text = Path(text).read_text()
        except OSError as error:
            raise LeanconvError(f"--ranks {text!r} cannot be read ({error.strerror}).") from None
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise LeanconvError(f'--ranks is not valid JSON ({error}); give {{"layer": rank, ...}}.') from None
