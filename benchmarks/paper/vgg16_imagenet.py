"""Six methods at 3x, 4x and 5x on VGG-16 with real ImageNet weights and pictures.

    python -m benchmarks.paper.vgg16_imagenet --data DIR --device cuda
    python -m benchmarks.paper.vgg16_imagenet --data DIR --device cpu --limit 64 --speedups 4

DIR holds calib.tar, val.tar, classes.json and vgg16_probe.safetensors: the VGG-16 convolutions and a linear head
in place of its three fully connected layers. Calibration uses calib.tar only, every figure is from val.tar.
Writes benchmarks/results/vgg16_imagenet[-NAME].json and .md.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import leanconv
from benchmarks.common.machine import machine
from benchmarks.common.results import RESULTS, write_results
from benchmarks.common.vgg16_probe import read_pictures, vgg16_probe
from leanconv.demo import METHODS
from leanconv.evaluation.classification import accuracy, agreement, logits_of


def run(options: argparse.Namespace) -> dict[str, Any]:
    classes = json.loads((options.data / "classes.json").read_text())
    calibration, _ = read_pictures(options.data / "calib.tar", options.limit, classes)
    pictures, labels = read_pictures(options.data / "val.tar", options.limit, classes)
    model = vgg16_probe(options.data / "vgg16_probe.safetensors").to(options.device)
    calibration = [batch.to(options.device) for batch in calibration]
    reference = logits_of(model, pictures, options.device)
    base = accuracy(reference, labels)
    print(f"original: top-1 {100 * base.top1:.1f}, top-5 {100 * base.top5:.1f}", flush=True)
    rows = []
    for speedup in options.speedups:
        for name, arguments in METHODS.items():
            if options.only and name not in options.only:
                continue
            started = time.perf_counter()
            result = leanconv.accelerate(
                model, calibration, speedup, **arguments, samples=options.samples, seed=options.seed, progress=False
            )
            seconds = time.perf_counter() - started
            logits = logits_of(result.model, pictures, options.device)
            found = accuracy(logits, labels)
            rows.append(
                {
                    "speedup": speedup,
                    "method": name,
                    "achieved": result.speedup,
                    "top1": found.top1,
                    "top5": found.top5,
                    "top5_change": found.top5 - base.top5,
                    "agreement": agreement(logits, reference),
                    "seconds": seconds,
                    "ranks": {layer.name: list(layer.ranks) for layer in result.layers},
                    "errors": {layer.name: layer.error for layer in result.layers},
                }
            )
            print(
                f"{speedup:g}x {name:24s} top-1 {100 * found.top1:5.1f} top-5 {100 * found.top5:5.1f} "
                f"({100 * (found.top5 - base.top5):+5.1f})  agreement {100 * rows[-1]['agreement']:5.1f}  "
                f"{seconds:6.1f} s",
                flush=True,
            )
    return {
        "script": "benchmarks/paper/vgg16_imagenet.py",
        "machine": machine(options.device),
        "leanconv": leanconv.__version__,
        "images": {"calibration": sum(len(b) for b in calibration), "evaluation": len(labels)},
        "samples": options.samples,
        "seed": options.seed,
        "original": {"top1": base.top1, "top5": base.top5},
        "rows": rows,
    }


def markdown(results: dict[str, Any]) -> str:
    original = results["original"]
    names = list(dict.fromkeys(row["method"] for row in results["rows"]))
    lines = [
        f"`{results['script']}` on {results['machine']}: VGG-16 with a linear head, "
        f"{results['images']['calibration']} calibration and {results['images']['evaluation']} evaluation images, "
        f"{results['samples']} samples a layer. Original: top-1 {100 * original['top1']:.1f}, "
        f"top-5 {100 * original['top5']:.1f}.",
        "",
        "Change of top-5 in points (top-1 agreement with the original in %, seconds):",
        "",
        "| conv speed-up | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for speedup in dict.fromkeys(row["speedup"] for row in results["rows"]):
        cells = [
            f"{100 * row['top5_change']:+.1f} ({100 * row['agreement']:.1f}, {row['seconds']:.1f} s)"
            for row in results["rows"]
            if row["speedup"] == speedup
        ]
        lines.append(f"| {speedup:g}x | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int, help="use this many images of each set")
    parser.add_argument("--speedups", type=float, nargs="+", default=[3.0, 4.0, 5.0])
    parser.add_argument("--only", nargs="+", choices=list(METHODS), help="only these methods")
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="vgg16_imagenet", help="stem of the files written")
    options = parser.parse_args()
    results = run(options)
    write_results(options.out, options.name, results, markdown(results))


if __name__ == "__main__":
    main()
