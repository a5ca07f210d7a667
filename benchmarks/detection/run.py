"""Faster R-CNN with VGG-16 on VOC 2012, accelerated before or after it is trained.

    python -m benchmarks.detection.run train --data VOC --weights vgg16_probe.safetensors --out detector.safetensors
    python -m benchmarks.detection.run train ... --speedup 4 --out fast.safetensors
    torchrun --nproc-per-node 2 -m benchmarks.detection.run train ...           # each process its share of a batch
    python -m benchmarks.detection.run train ... --held-out 640 --lr 2e-4       # to choose settings by
    python -m benchmarks.detection.run table --data VOC --weights vgg16_probe.safetensors --work WORK
    python -m benchmarks.detection.run table ... --seeds 0 --rows after tuned   # only some cells
    python -m benchmarks.detection.run table ... --speedups 4 --only classifier # only what several cells start from
    python -m benchmarks.detection.run table ... --seeds 0 1 --only baseline    # only what they are compared with
    python -m benchmarks.detection.run table ... --merge                        # only the table of what exists
    python -m benchmarks.detection.run table ... --known benchmarks/results/detection.json --seeds 4   # one seed more

VOC: see benchmarks/README.md. calib.tar, with which the classifier is accelerated, is in the folder of the weights.
Training and calibration use the training pictures only; every figure is from the others. `table` writes a file for each
cell to WORK/cells and the detectors it starts from to WORK/models, and detection.json and detection.md to
benchmarks/results. With --known TABLE.json the cells of that table are taken over, so that seeds can be added to it.
Times are those of benchmarks.detection.times.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from benchmarks.common.results import RESULTS, write_results
from benchmarks.detection.table import BASELINE, KINDS, Bench, Cell, scenes_of
from benchmarks.detection.training import (
    Training,
    accelerated,
    backbone_macs,
    build,
    clocked,
    detect,
    facts,
    original,
    read,
    save,
    train,
    within,
)
from leanconv import LeanconvError
from leanconv.config import Refine
from leanconv.evaluation.voc_ap import match, mean_over_classes, precisions

UNKNOWN = "not measured"


def markdown(table: Cell) -> str:
    seeds, settings = table["seeds"], table["settings"]
    training, tuning = settings["training"], settings["tuning"]
    how = ", ".join(f"{name}={value!r}" for name, value in settings["how"].items())
    heads = ["detector", "conv GMACs", *(f"mAP, seed {seed} (difference, 95 %)" for seed in seeds)]
    heads += ["mean mAP", "mean difference"]
    return (
        "\n".join(
            [
                f"`{table['script']} table` on {table['machine'] or UNKNOWN}: Faster R-CNN with VGG-16 on VOC 2012, "
                f"pictures of {settings['size']} pixels, {training['epochs']} epochs"
                f", the classifier accelerated with {how}, fine-tuning "
                f"{tuning['epochs']} epochs at a rate of {tuning['lr']:g}. mAP at IoU 0.5 in %, differences from the "
                f"original of the same seed in points with their paired bootstrap interval; MACs of the backbone on a "
                f"{settings['size']} x {settings['size']} picture.",
                "",
                "| " + " | ".join(heads) + " |",
                "|---" * len(heads) + "|",
                *("| " + " | ".join(_cells(row)) + " |" for row in table["rows"]),
                "",
                f"- The paper: {table['paper']}",
            ]
        )
        + "\n"
    )


def _cells(row: Cell) -> list[str]:
    known = [cell for cell in row["cells"] if cell]
    changes = [cell["difference"] for cell in known if "difference" in cell]
    none = "-" if row["kind"] == BASELINE else UNKNOWN
    return [
        row["title"],
        f"{known[0]['macs'] / 1e9:.2f}" if known else UNKNOWN,
        *(_score(cell) for cell in row["cells"]),
        f"{100 * statistics.mean(cell['map'] for cell in known):.1f}" if known else UNKNOWN,
        f"{100 * statistics.mean(changes):+.1f}" if changes else none,
    ]


def _score(cell: Cell | None) -> str:
    if cell is None:
        return UNKNOWN
    if "difference" not in cell:
        return f"{100 * cell['map']:.1f}"
    return "{:.1f} ({:+.1f}, {:+.1f} to {:+.1f})".format(
        *(100 * cell[key] for key in ("map", "difference", "low", "high"))
    )


def training_of(options: argparse.Namespace, seed: int) -> Training:
    return Training(
        epochs=options.epochs,
        batch=options.batch,
        lr=options.lr,
        frozen=options.frozen,
        seed=seed,
        scales=tuple(options.scales),
    )


def train_one(options: argparse.Namespace) -> None:
    device = joined(options.device)
    lead = not dist.is_initialized() or dist.get_rank() == 0
    seconds: dict[str, float] = {}
    with clocked(seconds, "read", device):
        scenes = scenes_of(options.data, "train", options.limit)
        judges = scenes.spread(options.held_out) if options.held_out else scenes_of(options.data, "val", options.limit)
        kept = {id(scene) for scene in judges.scenes}
        scenes = replace(scenes, scenes=tuple(scene for scene in scenes.scenes if id(scene) not in kept))
        data, held = (read(these, options.size, device) for these in (scenes, judges))
    settings = training_of(options, options.seed)
    about = facts(settings, size=options.size, width=options.width, classes=data.classes)
    features, changes = original(options.weights).features, []
    if options.speedup > 1:
        with clocked(seconds, "accelerate", device):
            result = accelerated(
                options.weights, options.calibration, options.speedup, device, options.limit, **how_of(options)
            )
        features, changes = result.model.features, within(result.changes, "features")
    torch.manual_seed(options.seed)
    detector = build(data.classes, features, size=options.size, width=options.width, frozen=options.frozen)
    with clocked(seconds, "train", device):
        losses = train(detector, data, settings, device)
    if not lead:
        return
    with clocked(seconds, "detect", device):
        found = detect(detector, held, device)
    with clocked(seconds, "judge", device):
        values = precisions(match(found, held.targets, len(data.classes)))
    score = mean_over_classes(values)
    about |= {"speedup": options.speedup, "macs": backbone_macs(detector, options.size, device), "losses": losses}
    known = {name: value for name, value in zip(data.classes, values, strict=True) if value == value}
    save(detector, options.out, about | {"map": score, "ap": known, "seconds": seconds}, changes)
    print(f"mAP {100 * score:.2f} on {len(held)} pictures; {options.out}", flush=True)


def joined(device: str) -> str:
    """This process's device, under torchrun with the others."""
    if "RANK" in os.environ and not dist.is_initialized():
        if device.startswith("cuda"):
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return device


def how_of(options: argparse.Namespace) -> dict[str, Any]:
    """The classifier is accelerated."""
    steps = {"steps": options.steps} if options.refine == "distill" else {}
    return {"refine": options.refine, "ranks": options.ranks, "samples": options.samples, **steps}


def bench_of(options: argparse.Namespace) -> Bench:
    training = training_of(options, 0)
    return Bench(
        data=options.data,
        weights=options.weights,
        pictures=options.calibration,
        work=options.work,
        training=training,
        tuning=replace(training, epochs=options.tune_epochs, lr=options.tune_lr or options.lr / 3),
        size=options.size,
        width=options.width,
        calibration=options.pictures,
        how=how_of(options),
        limit=options.limit,
        device=options.device,
        known=options.known,
    )


def make_table(options: argparse.Namespace) -> None:
    bench = bench_of(options)
    if options.only == "classifier":
        for speedup in options.speedups:
            with clocked({}, f"classifier {speedup:g}x", options.device):
                bench.classifier(speedup)
        return
    if options.only == "baseline":
        for seed in options.seeds:
            bench.measure(BASELINE, None, seed)
        return
    for seed in [] if options.merge else options.seeds:
        bench.measure(BASELINE, None, seed)
        for speedup in options.speedups:
            for kind in options.rows:
                bench.measure(kind, speedup, seed)
    table = bench.table(options.speedups, options.seeds)
    write_results(options.out, "detection", table, markdown(table))


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("train", help="train one detector and judge it")
    several = commands.add_parser("table", help="the original against accelerated ones")
    for command in (one, several):
        command.add_argument("--data", type=Path, required=True)
        command.add_argument("--weights", type=Path, required=True)
        command.add_argument(
            "--calibration",
            type=Path,
            nargs="+",
            help="pictures the classifier is accelerated on; calib.tar by the weights and the training pictures",
        )
        command.add_argument("--epochs", type=int, default=8)
        command.add_argument("--refine", choices=get_args(Refine), default="distill", help="of the classifier")
        command.add_argument("--ranks", choices=("energy", "sensitivity"), default="sensitivity", help="of it, too")
        command.add_argument("--samples", type=int, default=150_000, help="of it, too")
        command.add_argument("--steps", type=int, default=2400, help="of its distillation, twice the default")
        command.add_argument("--batch", type=int, default=16, help="pictures a step, of all processes together")
        command.add_argument("--lr", type=float, default=1e-4)
        command.add_argument("--frozen", type=int, default=2, help="blocks of VGG-16 that are not trained")
        command.add_argument("--size", type=int, default=320, help="side of the canvases, pixels")
        command.add_argument("--width", type=int, default=1024, help="of fc6 and fc7")
        command.add_argument("--scales", type=int, nargs="+", default=[], help="sides a batch is scaled to, at random")
        command.add_argument("--limit", type=int, help="use this many pictures of each set, to try things out")
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    one.add_argument("--speedup", type=float, default=1.0, help="of the convolutions, before training")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument(
        "--held-out", type=int, help="judge on this many training pictures, left out of training: to choose settings by"
    )
    one.add_argument("--out", type=Path, default=Path("detector.safetensors"))
    one.set_defaults(run=train_one)
    several.add_argument("--speedups", type=float, nargs="+", default=[2.0, 3.0, 4.0, 5.0])
    several.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    several.add_argument("--rows", nargs="*", default=list(KINDS), choices=list(KINDS), help="what is measured now")
    several.add_argument("--pictures", type=int, default=500, help="training pictures a detector is accelerated on")
    several.add_argument("--tune-epochs", type=int, default=2)
    several.add_argument("--tune-lr", type=float, help="a third of --lr")
    several.add_argument("--work", type=Path, default=Path("detection-work"))
    several.add_argument("--only", choices=("classifier", "baseline"), help="make these, and no table")
    several.add_argument("--known", type=Path, help="a table (.json) whose cells are not measured again")
    several.add_argument("--merge", action="store_true", help="measure nothing, show what is known")
    several.add_argument("--out", type=Path, default=RESULTS)
    several.set_defaults(run=make_table)
    options = parser.parse_args(arguments)
    # Pictures held out are not to be seen before, not even without their labels.
    training = [] if getattr(options, "held_out", None) else sorted(options.data.glob("train*.tar"))
    options.calibration = options.calibration or [options.weights.parent / "calib.tar", *training]
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    try:
        options.run(options)
    except LeanconvError as error:
        raise SystemExit(f"benchmarks.detection.run: {error}") from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
