"""scheme="3c" against "3d": the same MACs, the same images, judged on others by the original's own answers.

    python benchmarks/three_c.py --data DIR --model vgg16-imagenet --device cuda
    python benchmarks/three_c.py --data CIFAR --model vgg16-cifar10 resnet20-cifar10 --device cuda

DIR and CIFAR are those of ablation.py. Networks are accelerated on four fifths of the calibration pictures, with ranks
by sensitivity, and judged on the others; 3c holds out an eighth of the four fifths to choose by. Cells that are there
are not measured again. Writes benchmarks/results/three_c.json and .md.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from ablation import NETWORKS, SPEEDUPS, held_out
from keeping import RESULTS, keep
from paper_data import Subject
from vgg16_imagenet import machine

import leanconv

SCHEMES = ("3d", "3c")
WAYS = {"closed form": "closed-form", "distilled": "distill"}
HEADS = ("speed-up", "way", "pictures, others to judge", "samples", "seed", "scheme")
HEADS += ("MACs", "KL", "agreement %", "pruned by", "seconds")


def cell(subject: Subject, speedup: float, scheme: Any, way: str, seed: int, samples: int) -> dict[str, Any]:
    started = time.perf_counter()
    result = leanconv.accelerate(
        subject.model,
        subject.calibration,
        speedup,
        scheme,
        ranks="sensitivity",
        refine=WAYS[way],  # type: ignore[arg-type]
        samples=samples,
        seed=seed,
        progress=False,
    )
    seconds = time.perf_counter() - started
    score = subject.score(result.model)
    return {
        "model": subject.name,
        "speedup": speedup,
        "scheme": scheme,
        "way": way,
        "seed": seed,
        "samples": samples,
        "images": [sum(map(len, subject.calibration)), len(subject.labels)],
        "macs": result.speedup,
        "kl": score.kl,
        "agreement": 100 * score.agreement,
        "pruning": result.pruning,
        "seconds": seconds,
        "machine": machine(subject.device),
    }


def key(found: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(found[name] for name in ("model", "speedup", "way", "seed", "samples", "images", "scheme"))


def markdown(cells: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    for name in dict.fromkeys(one["model"] for one in cells):
        own = sorted((one for one in cells if one["model"] == name), key=lambda one: [str(part) for part in key(one)])
        lines += [
            f"`python benchmarks/three_c.py --model {name}`, --samples and --limit as in the columns, on "
            f"{', '.join(sorted({one['machine'] for one in own}))}: "
            "KL from the original's outputs and agreement with its first answers on pictures held out; how much was "
            "pruned, in MACs, of what was tried (KL on its own judges).",
            "",
            "| " + " | ".join(HEADS) + " |",
            "|---" * len(HEADS) + "|",
        ]
        for one in own:
            fitted, judged = one["images"]
            pruned = "" if one["pruning"] is None else f"{one['pruning']['factor']:.2f}"
            if one["pruning"] is not None:
                pruned += " of " + ", ".join(f"{factor:.2f} ({by:.4f})" for factor, by in one["pruning"]["tried"])
            seconds = "" if one["seconds"] is None else f"{one['seconds']:.0f}"
            lines.append(
                f"| {one['speedup']:g}x | {one['way']} | {fitted:,}, {judged:,} | {one['samples']:,} | {one['seed']} | "
                f"{one['scheme']} | {one['macs']:.3f} | {one['kl']:.4f} | {one['agreement']:.2f} | {pruned} | "
                f"{seconds} |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", nargs="+", choices=list(NETWORKS), default=["vgg16-cifar10"])
    parser.add_argument("--speedups", nargs="+", type=float, help="default: those of ablation.py")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["closed form"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--limit", type=int, help="calibration pictures, fewer than there are")
    parser.add_argument("--beside", action="store_true", help="other jobs run on the machine: seconds are not kept")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    file = options.out / "three_c.json"
    cells: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    for name in options.model:
        subject = held_out(NETWORKS[name](options.data, options.device, options.limit))
        images = [sum(map(len, subject.calibration)), len(subject.labels)]
        for speedup in options.speedups or SPEEDUPS[name]:
            for way in options.ways:
                for seed in options.seeds:
                    for scheme in SCHEMES:
                        asked = (name, speedup, way, seed, options.samples, images, scheme)
                        if asked in map(key, cells):
                            continue
                        one = cell(subject, speedup, scheme, way, seed, options.samples)
                        print(f"{name} {speedup:g}x {way} seed {seed} {scheme}: KL {one['kl']:.4f}", flush=True)
                        if options.beside:
                            one["seconds"] = None
                        cells.append(one)
                        keep(options.out, "three_c", cells, markdown(cells))


if __name__ == "__main__":
    main()
