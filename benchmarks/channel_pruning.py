"""Is channel pruning worth adding? VGG-16 with and without it, accelerated to the same MACs in all; no labels.

    python benchmarks/channel_pruning.py --data DIR --model vgg16-imagenet --device cuda --seconds 100
    python benchmarks/channel_pruning.py --data CIFAR --model vgg16-cifar10 --device cuda

DIR and CIFAR are those of paper.py. Pruning by p: filters of a convolution go whose maps the next convolution misses
least, by least squares (He, Zhang, Sun, "Channel Pruning for Accelerating Very Deep Neural Networks", 2017, with greedy
elimination in place of LASSO), until the network has p times fewer MACs; accelerate then does the rest of the speed-up.
p = 1 is accelerate alone. Networks are made with four fifths of the calibration pictures and judged on the others, by
the original's own answers. The ImageNet network is right and sure on every calibration picture tried, as if its head
knew them: look there at the features, which no head is asked about. Writes benchmarks/results/channel_pruning.json and
.md; cells that are in there are not computed again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from ablation import held_out
from keeping import RESULTS, keep
from paper_data import NAMES, SUBJECTS, Subject
from pruning import Pruned, Pruning, features_of, showing
from torch import nn
from vgg16_imagenet import machine

import leanconv
from leanconv.train.refine import distilled

CLOSED = {"samples": 150_000, "refine": "closed-form", "ranks": "sensitivity"}
DISTILLED = "then distilled"  # as accelerate's own refine="distill" does, from the original as it was
WAYS: dict[str, dict[str, Any]] = {
    "closed form, sensitivity": CLOSED,
    DISTILLED: CLOSED,
    "plain": {"refine": "none"},
}
SPEEDUPS = {"vgg16-imagenet": (4.0, 5.0), "vgg16-cifar10": (4.0, 6.0)}
FACTORS = (1.0, 1.3, 1.15, 1.6)
FIRST = 3  # of the factors are tried in every way before the others


@torch.no_grad()
def judged(subject: Subject, model: nn.Module) -> dict[str, float]:
    """On pictures not calibrated with; ``features``: ||f - f~|| / ||f|| of the last convolution's maps."""
    score, wrong, whole = subject.score(model), 0.0, 0.0
    for pictures in subject.pictures:
        f, found = (features_of(network)(pictures) for network in (subject.model, model))
        wrong += float((f - found).double().square().sum())
        whole += float(f.double().square().sum())
    return {"kl": score.kl, "agreement": 100 * score.agreement, "features": (wrong / whole) ** 0.5}


def cell(
    subject: Subject, pruning: Pruning, pruned: Pruned | None, speedup: float, way: str, **changed: Any
) -> dict[str, Any]:
    """``pruned``: None for the original as it is."""
    arguments = {**WAYS[way], **changed}
    started = time.perf_counter()
    if pruned is None:
        result = leanconv.accelerate(subject.model, subject.calibration, speedup, progress=False, **arguments)
    else:
        with pruning.answering(pruned.kept):
            rest = speedup * pruned.macs / pruning.macs
            result = leanconv.accelerate(pruned.model, subject.calibration, rest, progress=False, **arguments)
    if way == DISTILLED:
        kept = {} if pruned is None else pruned.kept
        original = subject.model if pruned is None else pruning.model
        pictures = torch.cat(subject.calibration)
        with showing(original, kept):
            result = distilled(result, original, pictures, seed=0, device=pictures.device, workdir=None, progress=False)
    seconds = time.perf_counter() - started
    return {"macs": pruning.macs / result.macs_after, **judged(subject, result.model), "seconds": seconds}


def _seconds(row: dict[str, Any]) -> str:
    return "" if row["seconds"] is None else f"{row['seconds']:.1f}"


def markdown(results: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    for one in results:
        images = one["images"]
        lines += [
            f"`python benchmarks/channel_pruning.py --model {one['model']}` on {one['machine']}: "
            f"{images['calibration']} pictures to prune and calibrate with, {images['judged']} others to judge by, "
            f"{one['positions']} positions a picture for pruning. MACs before / after in all, KL from the original's "
            "outputs, agreement with its first answers, error of the features, seconds of accelerate "
            "(where nothing else ran on the machine).",
            "",
            "| options | speed-up | pruned by | MACs | KL | agreement % | features | seconds |",
            "|---|---|---|---|---|---|---|---|",
        ]
        rows = sorted(one["cells"], key=lambda row: (list(WAYS).index(row["options"]), row["speedup"], row["factor"]))
        lines += [
            f"| {row['options']} | {row['speedup']:g}x | {row['factor']:g} | {row['macs']:.3f} | {row['kl']:.4f} | "
            f"{row['agreement']:.2f} | {row['features']:.4f} | {_seconds(row)} |"
            for row in rows
        ]
        lines += ["", "| pruned by, alone | MACs | KL | agreement % | features | seconds | " + " | ".join(NAMES) + " |"]
        lines += ["|---" * (6 + len(NAMES)) + "|"]
        lines += [
            f"| {row['factor']:g} | {row['macs']:.3f} | {row['kl']:.4f} | {row['agreement']:.2f} | "
            f"{row['features']:.4f} | {_seconds(row)} | " + " | ".join(str(keep) for keep in row["kept"]) + " |"
            for row in one["pruned"]
        ]
        lines.append("")
    return "\n".join(lines)


def measured(
    subject: Subject, options: argparse.Namespace, end: float, known: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The cells of a network beside those ``known``, as far as there is time: what is known after each."""
    started = time.perf_counter()
    pictures = torch.cat(subject.calibration)
    pruning = Pruning(subject.model, pictures, positions=options.positions)
    print(f"{subject.name}: elimination curves, {time.perf_counter() - started:.1f} s", flush=True)
    changed = {} if options.samples is None else {"samples": options.samples}
    found: dict[str, Any] = {
        "model": subject.name,
        "machine": machine(options.device),
        "leanconv": leanconv.__version__,
        "images": {"calibration": len(pictures), "judged": len(subject.labels)},
        "positions": options.positions,
        "pruned": known.get("pruned", []),
        "cells": known.get("cells", []),
    }
    there = {(row["options"], row["speedup"], row["factor"]) for row in found["cells"]}
    networks: dict[float, Pruned | None] = {1.0: None}
    for factors in (options.factors[:FIRST], options.factors[FIRST:]):
        for way in options.ways:
            for speedup in options.speedups or SPEEDUPS[subject.name]:
                for factor in factors:
                    if (way, speedup, factor) in there or time.monotonic() > end:
                        continue
                    if factor not in networks:
                        networks[factor] = pruned = pruning.prune(pruning.keeps(factor))
                        row = {
                            "factor": factor,
                            "macs": pruning.macs / pruned.macs,
                            **judged(subject, pruned.model),
                            "seconds": pruned.seconds,
                            "kept": [len(one) for one in pruned.kept.values()],
                        }
                        found["pruned"] = [one for one in found["pruned"] if one["factor"] != factor] + [row]
                        print(f"pruned by {factor:g}: {told(row)}, kept {row['kept']}", flush=True)
                        if options.beside:
                            row["seconds"] = None
                    row = cell(subject, pruning, networks[factor], speedup, way, **changed)
                    print(f"{subject.name} {speedup:g}x {way}, pruned by {factor:g}: {told(row)}", flush=True)
                    if options.beside:
                        row["seconds"] = None
                    found["cells"].append({"options": way, "speedup": speedup, "factor": factor, **row})
                    yield found


def told(row: dict[str, Any]) -> str:
    return (
        f"MACs {row['macs']:.3f}x, KL {row['kl']:.4f}, agreement {row['agreement']:.2f} %, "
        f"features {row['features']:.4f}, {row['seconds']:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", nargs="+", choices=list(SUBJECTS), default=["vgg16-imagenet"])
    parser.add_argument("--speedups", nargs="+", type=float, help="default: 4 and 5, of CIFAR's network 4 and 6")
    parser.add_argument(
        "--factors", nargs="+", type=float, default=list(FACTORS), help="pruning; 1 is accelerate alone"
    )
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="options of accelerate")
    parser.add_argument("--positions", type=int, default=50, help="sampled a picture for pruning")
    parser.add_argument("--samples", type=int, help="of accelerate, for a trial")
    parser.add_argument("--seconds", type=float, default=1e9, help="no cell is begun after so many")
    parser.add_argument("--beside", action="store_true", help="other jobs run on the machine: seconds are not kept")
    parser.add_argument("--limit", type=int, help="pictures, for a trial")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    file = options.out / "channel_pruning.json"
    results: dict[str, dict[str, Any]] = (
        {one["model"]: one for one in json.loads(file.read_text())} if file.exists() else {}
    )
    for name in options.model:
        subject = held_out(SUBJECTS[name](options.data, options.device, options.limit))
        for found in measured(subject, options, end, results.get(name, {})):
            results[name] = found
            # After every cell: a run that is stopped has told what it knew.
            keep(options.out, "channel_pruning", list(results.values()), markdown(list(results.values())))


if __name__ == "__main__":
    main()
