"""How many samples a layer: fixed numbers of them against samples="auto", which looks for as many as each layer needs.

    python benchmarks/samples.py --data DIR --model vgg16-imagenet --device cuda
    python benchmarks/samples.py --data CIFAR --model vgg16-cifar10 resnet20-cifar10 --device cuda

DIR and CIFAR are those of ablation.py. Networks are accelerated with leanconv's default fit on four fifths of the
calibration pictures and judged on the others, by the original's own answers. Results are added to those there are of
other networks: benchmarks/results/samples.json and .md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from ablation import NETWORKS, held_out
from keeping import RESULTS, keep
from paper_data import Subject
from vgg16_imagenet import machine

import leanconv

SPEEDUPS = {"vgg16-imagenet": 4.0, "vgg16-cifar10": 4.0, "resnet20-cifar10": 2.0}
# Samples, and with "auto" how many are looked at.
WAYS: dict[str, tuple[Any, int]] = {
    "50,000": (50_000, 0),
    "100,000": (100_000, 0),
    "150,000": (150_000, 0),
    "auto, up to 100,000": ("auto", 100_000),
    "auto, up to 200,000": ("auto", 200_000),
}


def cell(subject: Subject, speedup: float, way: str, seed: int) -> dict[str, Any]:
    samples, most = WAYS[way]
    with patch("leanconv.options.MOST", most):
        started = time.perf_counter()
        result = leanconv.accelerate(
            subject.model, subject.calibration, speedup, samples=samples, seed=seed, progress=False
        )
        seconds = time.perf_counter() - started
    used = [layer.samples for layer in result.layers if layer.samples]
    return {
        "model": subject.name,
        "speedup": speedup,
        "way": way,
        "seed": seed,
        "kl": subject.score(result.model).kl,
        "seconds": seconds,
        "samples": statistics.mean(used),
        "machine": machine(subject.device),
        "images": [sum(map(len, subject.calibration)), len(subject.labels)],
    }


def markdown(cells: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    for model in dict.fromkeys(one["model"] for one in cells):
        own = [one for one in cells if one["model"] == model]
        fitted, judged = own[0]["images"]
        lines += [
            f"`python benchmarks/samples.py --model {model}` on {own[0]['machine']}: {own[0]['speedup']:g}x, "
            f"{fitted:,} pictures to accelerate with, {judged:,} others to judge by; medians of "
            "the seeds; seconds of what ran alone on the machine.",
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
    parser.add_argument("--model", nargs="+", choices=list(NETWORKS), default=["vgg16-imagenet"])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--beside", action="store_true", help="other jobs run on the machine: seconds are not kept")
    parser.add_argument("--limit", type=int, help="pictures, for a trial")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    file = options.out / "samples.json"
    known = json.loads(file.read_text()) if file.exists() else []
    cells = [one for one in known if one["model"] not in options.model]
    for name in options.model:
        subject = held_out(NETWORKS[name](options.data, options.device, options.limit))
        # A GPU's first call loads its kernels; no cell is to be charged for that.
        leanconv.accelerate(subject.model, subject.calibration[:1], 2.0, samples=1000, progress=False)
        for seed in options.seeds:
            for way in options.ways:
                cells.append(cell(subject, SPEEDUPS[name], way, seed))
                if options.beside:
                    cells[-1]["seconds"] = None
                print({key: cells[-1][key] for key in ("model", "way", "seed", "kl", "seconds", "samples")}, flush=True)
    keep(options.out, "samples", cells, markdown(cells))


if __name__ == "__main__":
    main()
