"""``leanconv accelerate``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from leanconv.cli import common
from leanconv.cli.options import OptionsOf, help_of
from leanconv.config import Options
from leanconv.errors import LeanconvError, listing
from leanconv.runtimes.runners import RUNTIMES, runtime_names
from leanconv.system.threads import MOST, spin_little

# Options that this command spells in another way.
OTHERWISE = ("asymmetric", "ranks", "skip", "samples", "target", "refine")


def accelerate(
    model: common.Model,
    images: Annotated[
        str,
        typer.Option(
            help="Images, labelled or not: a folder, .tar files (also 'calib-{00..03}.tar'), or hf:NAME:SPLIT."
        ),
    ],
    out: common.NewFolder,
    *,
    refine: Annotated[str | None, typer.Option(help=help_of(Options, "refine"))] = None,
    options: Annotated[dict[str, Any], OptionsOf(Options, skip=OTHERWISE)],
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Fit every layer to the exact input.")] = False,
    ranks: Annotated[str, typer.Option(help=help_of(Options, "ranks"))] = "auto",
    paper: Annotated[
        bool, typer.Option("--paper", help="Exactly the method of 2015: --refine none --ranks energy.")
    ] = False,
    runtime: Annotated[
        str | None, typer.Option(help=f"--ranks latency: what is timed, {runtime_names(timeable=True)}.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST,
            help="CPU threads of the run. Default: as many as there are idle cores. With --ranks latency: threads of "
            "that runtime (1).",
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="--ranks latency: float32 (default), bfloat16 or float16.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help=help_of(Options, "skip"))] = None,
    no_skip: Annotated[bool, typer.Option("--no-skip", help="Leave no layer alone, not even the first.")] = False,
    count: Annotated[int, typer.Option(min=1, help="Use at most this many images, spread over all.")] = 1000,
    samples: Annotated[str, typer.Option(help=help_of(Options, "samples"))] = "50000",
    workdir: common.Workdir = None,
    memory: Annotated[
        str | None, typer.Option(help="What the run may keep in memory, e.g. 8GB. Default: half of what is free.")
    ] = None,
    weights: common.Weights = None,
    num_classes: common.Classes = None,
    preprocessing: common.ImageOptions,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Images a batch (32; detectors 8); with --ranks latency: images a timed call (1)."),
    ] = None,
    workers: common.Workers = None,
    device: common.Device = None,
    report: Annotated[bool, typer.Option("--report", help="Also write a page about it, OUT/report.html.")] = False,
    as_json: common.Json = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print the result and errors, no progress and no warnings.")
    ] = False,
) -> None:
    """Accelerate a network and save it.

    Examples:

    leanconv accelerate vgg16 --images photos/ --speedup 4 --out vgg16-4x

    leanconv accelerate vgg16 --images photos/ --ranks latency --runtime onnxruntime --threads 1 --out vgg16-fast

    leanconv accelerate fasterrcnn_resnet50_fpn --images photos/ --count 300 --part backbone --out detector-4x

    leanconv accelerate net.py:build --weights net.safetensors --images calib.tar --out net-3x --speedup 3

    torchrun --nproc-per-node 4 -m leanconv accelerate vgg16 --images photos/ --out vgg16-4x --workdir work
    """
    spin_little()
    from dataclasses import replace

    from leanconv.api import PAPER, accelerate_as
    from leanconv.calibrate.memory import parse_memory
    from leanconv.cli.networks import load_network
    from leanconv.images import Pictures, WholePictures, find_pictures, spread
    from leanconv.network.source import confirmed
    from leanconv.network.torchvision_detectors import kind_of
    from leanconv.pipeline.session import Session
    from leanconv.report import REPORT, check_page, write_report
    from leanconv.storage.folder import check_new
    from leanconv.train.history import History

    if skip and no_skip:
        raise LeanconvError("--skip and --no-skip contradict each other; give one of them.")
    if common.is_saved(model):
        raise LeanconvError(f"MODEL {model!r} is a folder; accelerate takes the original network, not a saved one.")
    if paper:
        refine, ranks = refine or PAPER["refine"], PAPER["ranks"] if ranks == "auto" else ranks
    ranks_or_method = _ranks(ranks)
    target = None
    if ranks_or_method == "latency":
        target = _target(runtime=runtime, threads=threads, dtype=dtype, batch=batch, device=device)
        batch = threads = None  # those of the target
    else:
        of_target = {"runtime": runtime, "dtype": dtype}
        common.refuse(of_target, "goes with --ranks latency only; leave it out or give that")
    checked = Options.check(  # before minutes are spent on loading
        **options,
        refine=refine,
        asymmetric=not symmetric,
        ranks=ranks_or_method,
        skip=[] if no_skip else skip or None,
        samples=_samples(samples),
        target=target,
    )
    limit = parse_memory(memory)
    check_new(out)
    if report:
        check_page(out / REPORT, "report")
    pictures = spread(find_pictures(images), count)
    with common.quietly(quiet), common.team(device) as (place, lead):
        build = common.NetworkOptions(weights=weights, num_classes=num_classes)
        network = load_network(model, build, default_weights="DEFAULT")
        processes = common.pick_workers(workers)
        preprocess = None
        batches: Pictures | WholePictures
        if kind_of(network.model) is None:
            prepare = network.preprocess(preprocessing)
            preprocess = prepare.to_json(network.preset)
            batches = Pictures(pictures, prepare, batch=batch or 32, workers=processes, pin=place.type == "cuda")
        else:
            common.refuse(
                vars(preprocessing), "does not go with a detector, which resizes and normalises images itself"
            )
            batches = WholePictures(pictures, batch=batch or 8, workers=processes)
        session = Session(
            network.model, place, checked.seed, progress=not quiet, workdir=workdir, limit=limit, threads=threads
        )
        result = accelerate_as(network.model, batches, checked, session)
        if not lead:
            return
        assert network.source is not None
        source = confirmed(network.model, result.source, network.source)
        result = replace(result, source=source, preprocess=preprocess, command=_command())
        result.save(out)
        page = write_report(out) if report else None
    if as_json:
        about_page = {} if page is None else {"report": str(page)}
        common.print_json({**result.to_json(), "folder": str(out), "unreadable": batches.unreadable, **about_page})
    else:
        print(result)
        if result.training is not None:
            history = History.from_json(result.training["history"])
            print(*filter(None, [history.stopped, f"distilled: {history.verdict()}"]), sep="\n")
        if quiet and batches.unreadable:  # without --quiet there were warnings
            print(f"left out, as they cannot be read: {listing(batches.unreadable)}")
        needed = ", model=..." if result.source.library == "other" else ""
        print(f"saved to {out}; use it: leanconv.load({str(out)!r}{needed})")
        if page is not None:
            print(f"report: {page}, open it in a browser")


def _command() -> list[str]:
    """The command line as it was typed, with torchrun if there are several processes."""
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    start = ["leanconv"] if processes == "1" else ["torchrun", "--nproc-per-node", processes, "-m", "leanconv"]
    return [*start, *sys.argv[1:]]


def _target(*, runtime: str | None, device: str | None, **others: Any) -> dict[str, Any]:
    """What --ranks latency times; torch runs on the device of the command."""
    target = {"runtime": runtime, **others}
    if runtime is None or (runtime in RUNTIMES and RUNTIMES[runtime].device is None):
        target["device"] = str(common.pick_device(device))
    return {name: value for name, value in target.items() if value is not None}


def _samples(text: str) -> Any:
    """An int, or the word as it is."""
    try:
        return int(text)
    except ValueError:
        return text


def _ranks(text: str) -> Any:
    """The name of a method, or ranks by hand from JSON or a .json file."""
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
