"""What each step past the paper is worth, alone and added to the others: same images, same MACs, no labels.

    python -m benchmarks.ablation.run --data DIR --model vgg16-imagenet --device cuda
    python -m benchmarks.ablation.run --data DIR --model resnet50-imagenet efficientnet-lite0-imagenet --device cuda
    python -m benchmarks.ablation.run --data CIFAR --model vgg16-cifar10 resnet20-cifar10 --device cuda
    python -m benchmarks.ablation.run --data DIR --model vgg16-imagenet --held-out   # no evaluation pictures
    python -m benchmarks.ablation.run ... --known benchmarks/results/ablation.json --times   # what that table lacks
    python -m benchmarks.ablation.run --data CIFAR --model resnet20-cifar10 --speedups 2 3 4 5 --name ablation-cpu

DIR and CIFAR: see benchmarks/README.md. Every cell (network, speed-up, row, seed) is a file in --work, and is not
computed again: a run that was stopped continues, and several runs can share the cells. With --known TABLE.json the
cells of a table are known too, and go into the new one. With --held-out the networks are calibrated on four fifths of
the calibration pictures and judged on the others, by the original's own answers; no table is written. VGG-16's linear
head knows those by heart: look at KL, not at agreement. Cells that were computed beside other jobs (--beside) have no
seconds; --times runs them again, alone, for these, and keeps the KL it finds then ("kl again"), which tells whether the
code still does what it did. A cell says which commit it is of ("code"; of cells from before that was kept, the one they
came with); a machine without git is told by --code.
Writes benchmarks/results/ablation.json, .md and -summary.md, or NAME.json and .md with --name NAME.
The committed ablation-cpu is of a ResNet-20 trained on a CPU (benchmarks.common.cifar10 --network resnet20 --epochs 15
--batch 128), with two cells of vgg16-imagenet from a second call with the same --work, both with --device cpu --beside.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import leanconv
from benchmarks.ablation.rows import PAPER, ROWS, SPEEDUPS
from benchmarks.ablation.table import asked_for, markdown, summary
from benchmarks.common.machine import commit, machine
from benchmarks.common.results import RESULTS, slug, write_results
from benchmarks.common.subjects import NETWORKS, Subject, held_out, original_of, refuse_another_network
from leanconv.config import Options
from leanconv.evaluation.paired import paired_interval
from leanconv.ranks.spectra import Spectra
from leanconv.solve import Metric
from leanconv.system.atomic_files import write_whole


@contextmanager
def without(step: str | None) -> Iterator[None]:
    """leanconv without one step of its closed form."""
    with ExitStack() as changed:
        if step == "free filters":
            changed.enter_context(patch.object(Options, "free_filters", False))
        elif step == "images held out":
            changed.enter_context(patch("leanconv.pipeline.solve_layers.parted", lambda *_, **__: None))
        elif step == "splits as seen":
            changed.enter_context(patch.object(Spectra, "see", lambda *_: None))
        elif step == "the metric":
            changed.enter_context(patch.object(Metric, "of", lambda _: None))
        yield


def cell(subject: Subject, speedup: float, row: str, seed: int, paper: Path) -> dict[str, Any]:
    """``paper``: a file for which pictures the paper's 3d of this speed-up and seed gets right."""
    arguments = {"refine": "none", "ranks": "energy", **ROWS[row]}
    images = subject.calibration
    if arguments.pop("images", None) == "all":
        images = [part.to(subject.device) for part in subject.training[0].split(500)]
    with without(arguments.pop("without", None)):
        started = time.perf_counter()
        result = leanconv.accelerate(
            subject.model, images, speedup, seed=seed, progress=False, device=subject.device, **arguments
        )
        seconds = time.perf_counter() - started
    score, right = subject.judged(result.model)
    gained: dict[str, float] = {}
    if row == PAPER:
        torch.save(right, paper)
    elif paper.exists():  # not where the paper's cell was taken over from a table
        _, low, high = paired_interval(right, torch.load(paper, weights_only=True))
        gained = {"gained, low": 100 * low, "gained, high": 100 * high}
    return {
        **gained,
        "model": subject.name,
        "speedup": speedup,
        "row": row,
        "seed": seed,
        "macs": result.speedup,
        "increase": subject.increase(score),
        "low": 100 * score.low,
        "high": 100 * score.high,
        "agreement": 100 * score.agreement,
        "kl": score.kl,
        "seconds": seconds,
        "machine": machine(subject.device),
        "original": original_of(subject),
    }


def name_of(found: dict[str, Any]) -> str:
    """Of a cell's file."""
    return f"{found['model']}-{found['speedup']:g}x-{slug(found['row'])}-seed{found['seed']}.json"


def cells_of(table: Path | None) -> dict[str, dict[str, Any]]:
    """The cells of a table, by the names their files would have."""
    cells = [] if table is None else json.loads(table.read_text())
    return {name_of(found): found for found in cells}


def cells_in(work: Path, place: str) -> dict[str, dict[str, Any]]:
    """Those in a folder, of files whose names begin with ``place``; without, all but those held out."""
    files = sorted(work.glob(f"{place}*.json" if place else "[!h]*.json"))
    return {file.name.removeprefix(place): json.loads(file.read_text()) for file in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", nargs="+", choices=list(NETWORKS), default=["vgg16-imagenet"])
    parser.add_argument("--speedups", nargs="+", type=float, help="default: those of the network's table")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=1e9, help="no cell is begun after so many")
    parser.add_argument("--beside", action="store_true", help="other jobs run on the machine: seconds are not kept")
    parser.add_argument("--times", action="store_true", help="only the seconds that known cells lack, by running again")
    parser.add_argument("--held-out", action="store_true", help="judge on calibration pictures, and write no table")
    parser.add_argument("--limit", type=int, help="pictures, for a trial")
    parser.add_argument("--code", default=commit(), help="the commit cells are said to be of; default: what git says")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--work", type=Path, required=True, help="folder of the cells")
    parser.add_argument("--known", type=Path, help="a table (.json) whose cells are not computed again")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="ablation", help="of the table's files; another one is for another network")
    options = parser.parse_args()
    if options.times and options.beside:
        parser.error("--times are of cells that run alone, and --beside says they do not; give one of them.")
    if options.known is not None and (options.held_out or options.limit or not options.known.is_file()):
        parser.error("--known takes the .json of a table, and is neither for --held-out nor for --limit.")
    options.work.mkdir(parents=True, exist_ok=True)
    known_before, place = cells_of(options.known), "held-out-" if options.held_out else ""
    end = time.monotonic() + options.seconds
    for name in options.model:
        subject = NETWORKS[name](options.data, options.device, options.limit)
        if options.held_out:
            subject = held_out(subject)
        refuse_another_network(subject, (known_before | cells_in(options.work, place)).values())
        # A GPU's first call loads its kernels; no cell is to be charged for that.
        if time.monotonic() < end:
            leanconv.accelerate(subject.model, subject.calibration[:1], 2.0, samples=1000, progress=False)
        for seed in options.seeds:
            for speedup in options.speedups or SPEEDUPS[name]:
                for row in options.rows:
                    called = name_of({"model": name, "speedup": speedup, "row": row, "seed": seed})
                    file = options.work / f"{place}{called}"
                    # Of ImageNet there are no other pictures than those.
                    extra = "images" in ROWS[row] and (name.endswith("-imagenet") or options.held_out)
                    known = json.loads(file.read_text()) if file.exists() else known_before.get(called)
                    wanted = known is None if not options.times else known is not None and known["seconds"] is None
                    if extra or not wanted or time.monotonic() > end:
                        continue
                    paper = options.work / f"{place}right-{name}-{speedup:g}x-seed{seed}.pt"
                    found = cell(subject, speedup, row, seed, paper) | {"code": options.code}
                    if known is not None:
                        again = {"seconds": found["seconds"], "timed on": found["machine"], "timed of": options.code}
                        again["kl again"] = found["kl"]
                        found = {**known, **again}
                    elif options.beside:
                        found["seconds"] = None
                    write_whole(file, json.dumps(found) + "\n")
                    print(
                        f"{name} {speedup:g}x seed {seed} {row}: {found['increase']:.2f} "
                        f"({found['low']:.1f} to {found['high']:.1f}), agreement {found['agreement']:.2f}, "
                        f"KL {found['kl']:.4f}" + ("" if found["seconds"] is None else f", {found['seconds']:.1f} s"),
                        flush=True,
                    )
    found_now = known_before | cells_in(options.work, place)
    cells = [found_now[called] for called in sorted(found_now)]
    if options.held_out:
        print(markdown(cells))
        return
    write_results(options.out, options.name, cells, markdown(cells, asked_for(options.name)))
    if options.name == "ablation":
        (options.out / "ablation-summary.md").write_text(summary(cells) + "\n")


if __name__ == "__main__":
    main()
