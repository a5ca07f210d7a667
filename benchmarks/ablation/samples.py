"""How many samples a layer, and where: fixed numbers of them, samples="auto", which looks for as many as each layer
needs, all there are, and as many as by default spread evenly over every map.

    python -m benchmarks.ablation.samples --data DIR --model vgg16-imagenet --device cuda
    python -m benchmarks.ablation.samples --data CIFAR --model vgg16-cifar10 resnet20-cifar10 --device cuda

DIR and CIFAR: see benchmarks/README.md. Networks are accelerated with leanconv's default fit on four fifths of the
calibration pictures and judged on the others, by the original's own answers. A table has the cells of one network on
one kind of machine. Cells that are computed again replace the old ones, all others stay; a network that was trained
again is refused: benchmarks/results/samples.json and .md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

import leanconv
from benchmarks.common.machine import machine
from benchmarks.common.results import RESULTS, write_results
from benchmarks.common.subjects import NETWORKS, Subject, held_out, original_of, refuse_another_network

SPEEDUPS = {"vgg16-imagenet": 4.0, "vgg16-cifar10": 4.0, "resnet20-cifar10": 2.0}


@dataclass(frozen=True)
class Way:
    samples: int | Literal["auto"]
    most: int = 0  # how many "auto" looks at
    spread: bool = False  # one position in each of equally many parts of a map, in place of any


WAYS = {
    "50,000": Way(50_000),
    "50,000, spread": Way(50_000, spread=True),
    "100,000": Way(100_000),
    "150,000": Way(150_000),
    "auto, up to 100,000": Way("auto", 100_000),
    "auto, up to 200,000": Way("auto", 200_000),
    "all": Way(2**32 - 1),
}


def spread_positions(images: int, positions: int, count: int, seed: tuple[int, int, int]) -> Tensor:
    """Like choose_positions: in each of ``count`` parts of a map's rows, one behind the other, one anywhere."""
    generator = torch.Generator().manual_seed(hash(seed))
    within = torch.rand(images, count, dtype=torch.float64, generator=generator)
    return ((torch.arange(count) + within) * positions / count).long().clamp_max(positions - 1)


def cell(subject: Subject, original: dict[str, Any], name: str, seed: int) -> dict[str, Any]:
    """``original``: how good the network is, with its labels."""
    way, speedup = WAYS[name], SPEEDUPS[subject.name]
    with ExitStack() as changed:
        changed.enter_context(patch("leanconv.config.MOST", way.most))
        if way.spread:
            changed.enter_context(patch("leanconv.calibrate.positions.choose_positions", spread_positions))
        started = time.perf_counter()
        result = leanconv.accelerate(
            subject.model, subject.calibration, speedup, samples=way.samples, seed=seed, progress=False
        )
        seconds = time.perf_counter() - started
    used = [layer.samples for layer in result.layers if layer.samples]
    return {
        "model": subject.name,
        "speedup": speedup,
        "way": name,
        "seed": seed,
        "kl": subject.score(result.model).kl,
        "seconds": seconds,
        "samples": statistics.mean(used),
        "machine": machine(subject.device),
        "original": original,
        "images": [sum(map(len, subject.calibration)), len(subject.labels)],
    }


def key(cell: dict[str, Any]) -> tuple[str, str, str, int]:
    return (*table_of(cell), cell["way"], cell["seed"])


def table_of(cell: dict[str, Any]) -> tuple[str, str]:
    """Cells of another machine are a table of their own: its numbers are rounded otherwise."""
    return cell["model"], cell["machine"]


def markdown(cells: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    for table in dict.fromkeys(map(table_of, cells)):
        own = [one for one in cells if table_of(one) == table]
        model, (fitted, judged) = own[0]["model"], own[0]["images"]
        good = sorted({f"; original: top-1 {one['original']['top1']:.2f} %" for one in own if "original" in one})
        lines += [
            f"`python -m benchmarks.ablation.samples --model {model}` on {own[0]['machine']}: {own[0]['speedup']:g}x, "
            f"{fitted:,} pictures to accelerate with, {judged:,} others to judge by; medians of "
            f"the seeds; seconds of what ran alone on the machine{''.join(good)}.",
            "",
            "| `samples` | seeds | fitted to, mean of the layers | KL | seconds |",
            "|---|---|---|---|---|",
        ]
        for way in WAYS:
            found = [one for one in own if one["way"] == way]
            if found:
                samples, kl = (statistics.median(one[key] for one in found) for key in ("samples", "kl"))
                alone = [one["seconds"] for one in found if one["seconds"] is not None]
                seconds = f"{statistics.median(alone):.1f}" if alone else ""
                lines.append(f"| {way} | {len(found)} | {samples:,.0f} | {kl:.4f} | {seconds} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", nargs="+", choices=list(SPEEDUPS), default=["vgg16-imagenet"])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--beside", action="store_true", help="other jobs run on the machine: seconds are not kept")
    parser.add_argument("--limit", type=int, help="pictures, for a trial")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    file = options.out / "samples.json"
    known = json.loads(file.read_text()) if file.exists() else []
    found: dict[Any, dict[str, Any]] = {}
    try:
        for name in options.model:
            subject = NETWORKS[name](options.data, options.device, options.limit)
            original, mine = original_of(subject), (name, machine(options.device))
            # Of cells from before it was kept nobody knows.
            refuse_another_network(subject, [one for one in known if table_of(one) == mine and "original" in one])
            subject = held_out(subject)
            # A GPU's first call loads its kernels; no cell is to be charged for that.
            leanconv.accelerate(subject.model, subject.calibration[:1], 2.0, samples=1000, progress=False)
            for seed in options.seeds:
                for way in options.ways:
                    one = cell(subject, original, way, seed)
                    if options.beside:
                        one["seconds"] = None
                    found[key(one)] = one
                    print(
                        {part: one[part] for part in ("model", "way", "seed", "kl", "seconds", "samples")}, flush=True
                    )
    finally:  # of a run that ends early, what was found
        if found:
            cells = list(({key(one): one for one in known} | found).values())
            write_results(options.out, "samples", cells, markdown(cells))


if __name__ == "__main__":
    main()
