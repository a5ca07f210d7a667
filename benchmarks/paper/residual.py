"""What fitting a layer together with its shortcut is worth, on trained residual networks, at equal MACs.

    python -m benchmarks.paper.residual [--arch basic|bottleneck|both] [--seeds 3]

In: scikit-learn's digits at 16 x 16. Each seed trains networks of torchvision's basic and bottleneck blocks on the
training images; the same images without labels calibrate, the held-out ones give the figures. Compared are

    residual-aware          what leanconv does: asymmetric, r(s + y) fitted by r(s^ + M y^ + b), s the shortcut
    symmetric               asymmetric=False: s and y of the original network on both sides
    no shortcut, linear     asymmetric, but a layer added to a shortcut is fitted alone: y by M y^ + b
    no shortcut, nonlinear  the same behind the activation that follows the sum: r(y) by r(M y^ + b)

Out: ||f - f~|| / ||f|| of the features f that enter the last Linear layer and the change of top-1, in
benchmarks/results/residual.json (every run) and .md (over the seeds).
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock, Bottleneck

import leanconv
from benchmarks.common.results import RESULTS, write_results
from leanconv.demo import TRAINING, digits, teach
from leanconv.evaluation.classification import accuracy, logits_of
from leanconv.network.activations import ActivationSpec
from leanconv.network.sites import Survey
from leanconv.network.survey import survey

BLOCKS: dict[str, type[BasicBlock] | type[Bottleneck]] = {"basic": BasicBlock, "bottleneck": Bottleneck}
# One a stage. A bottleneck block puts out four times its width, so it gets less of it: both kinds train in seconds.
WIDTHS = {"basic": (16, 32, 64), "bottleneck": (12, 24, 48)}
DEPTH = 2
Fields = dict[str, Any]
AWARE = "residual-aware"
# Arguments of accelerate, and what leanconv is told of the sites that are added to a shortcut.
VARIANTS: dict[str, tuple[Fields, Fields]] = {
    AWARE: ({}, {}),
    "symmetric": ({"asymmetric": False}, {}),
    "no shortcut, linear": ({}, {"adds": 0, "activation": ActivationSpec()}),
    "no shortcut, nonlinear": ({}, {"adds": 0}),
}


def resnet(arch: str) -> nn.Sequential:
    """Features (3 x 3 stem, a stage of ``DEPTH`` blocks for each width, 1 x 1 convolutions on the shortcuts where the
    shape changes, pooling) and a Linear layer; n x 1 x h x w -> n x 10."""
    block, channels = BLOCKS[arch], WIDTHS[arch][0]
    layers = [nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
    for stage, width in enumerate(WIDTHS[arch]):
        for number in range(DEPTH):
            stride, out = 2 if stage and not number else 1, width * block.expansion
            shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            layers.append(block(channels, width, stride, shortcut if stride > 1 or channels != out else None))
            channels = out
    return nn.Sequential(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(channels, 10))


def train(arch: str, pictures: Tensor, labels: Tensor, *, epochs: int, seed: int) -> nn.Module:
    """By the demo's training loop; the network comes back in eval mode."""
    torch.manual_seed(seed)
    model = resnet(arch)
    teach(model, pictures, labels, epochs=epochs)
    return model


@contextmanager
def shortcuts_as(told: Fields) -> Iterator[None]:
    """Inside, leanconv sees these fields in the sites that are added to a shortcut; their order stays."""

    def edited(*args: Any, **kwargs: Any) -> Survey:
        found = survey(*args, **kwargs)
        return replace(found, sites=tuple(replace(site, **told) if site.adds else site for site in found.sites))

    with mock.patch("leanconv.pipeline.prepare.survey", side_effect=edited) as spy:
        yield
    # Were the survey taken elsewhere, every variant would silently be the default.
    assert spy.called, "leanconv.pipeline.prepare.survey was not used"


def top1_and_features(model: nn.Module, pictures: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """Share of right first answers, and what enters the last Linear layer (n x channels, float64)."""
    batches = pictures.split(100)
    features = logits_of(model.get_submodule("0"), batches, "cpu").double()
    return accuracy(logits_of(model, batches, "cpu"), labels).top1, features


def compare(model: nn.Module, known: Tensor, test: Tensor, labels: Tensor, speedup: float, samples: int) -> Fields:
    """Every variant on one network at one speed-up: a row of the JSON file."""
    base, features = top1_and_features(model, test, labels)
    variants: dict[str, Fields] = {}
    for name, (arguments, told) in VARIANTS.items():
        started = time.perf_counter()
        with shortcuts_as(told):
            result = leanconv.accelerate(
                model, known, speedup, **arguments, samples=samples, refine="none", progress=False
            )
        seconds = time.perf_counter() - started
        top1, found = top1_and_features(result.model, test, labels)
        error = float((found - features).norm() / features.norm())
        variants[name] = {"error": error, "top1_change": top1 - base, "seconds": seconds, "macs": result.macs_after}
        print(f"  {speedup:g}x {name:24s} {error:.4f} {100 * (top1 - base):+6.1f} {seconds:6.1f} s", flush=True)
    assert len({variant["macs"] for variant in variants.values()}) == 1, "the variants differ in MACs"
    # The rank selection may leave a layer whole; no variant fits those.
    added = {site.name for site in survey(model, known[:1]).sites if site.adds}
    fitted = sum(layer.name in added for layer in result.layers)
    ranks = {layer.name: list(layer.ranks) for layer in result.layers}
    return {"speedup": speedup, "top1": base, "added": len(added), "fitted": fitted, "ranks": ranks} | variants


def run(options: argparse.Namespace) -> Fields:
    started = time.perf_counter()
    pictures, labels = digits()
    pictures = F.interpolate(pictures, size=16, mode="bilinear", align_corners=False)
    known, test, answers = pictures[:TRAINING], pictures[TRAINING:], labels[TRAINING:]
    rows = []
    for arch in BLOCKS if options.arch == "both" else [options.arch]:
        for seed in range(options.seeds):
            model = train(arch, known, labels[:TRAINING], epochs=options.epochs, seed=seed)
            print(f"{arch}, seed {seed}: trained, {time.perf_counter() - started:.0f} s since the start", flush=True)
            for speedup in options.speedups:
                found = compare(model, known, test, answers, speedup, options.samples)
                rows.append({"arch": arch, "seed": seed} | found)
    return {
        "script": "benchmarks/paper/residual.py",
        "machine": f"{platform.machine()} CPU, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "leanconv": leanconv.__version__,
        "images": {"training": len(known), "evaluation": len(test)},
        "samples": options.samples,
        "epochs": options.epochs,
        "seconds": time.perf_counter() - started,
        "rows": rows,
    }


def markdown(results: Fields) -> str:
    rows, images = results["rows"], results["images"]
    lines = [
        f"`{results['script']}` on {results['machine']}: {len({row['seed'] for row in rows})} networks of each kind, "
        f"trained {results['epochs']} epochs on digits, {images['training']} training and calibration and "
        f"{images['evaluation']} evaluation images, {results['samples']} samples a layer, {results['seconds']:.0f} s. "
        "Means over the networks (least to largest); layers: those added to a shortcut that were fitted.",
        "",
        "| blocks | top-1 | conv speed-up | layers | variant | feature error | top-1 change in points |",
        "|---|---|---|---|---|---|---|",
    ]
    for arch, speedup in dict.fromkeys((row["arch"], row["speedup"]) for row in rows):
        same = [row for row in rows if (row["arch"], row["speedup"]) == (arch, speedup)]
        top1, fitted = (mean(row[key] for row in same) for key in ("top1", "fitted"))
        for name in VARIANTS:
            errors = [row[name]["error"] for row in same]
            changes = [100 * row[name]["top1_change"] for row in same]
            lines.append(
                f"| {arch} | {100 * top1:.1f} | {speedup:g}x | {fitted:.1f} of {same[0]['added']} | {name} | "
                f"{mean(errors):.4f} ({min(errors):.4f} to {max(errors):.4f}) | "
                f"{mean(changes):+.1f} ({min(changes):+.1f} to {max(changes):+.1f}) |"
            )
    wins = {name: sum(row[AWARE]["error"] < row[name]["error"] for row in rows) for name in VARIANTS if name != AWARE}
    words = "; ".join(f"{count} against '{name}'" for name, count in wins.items())
    lines += ["", f"Cases (blocks x seed x speed-up) of {len(rows)} in which {AWARE} has the smaller error: {words}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=[*BLOCKS, "both"], default="both")
    parser.add_argument("--seeds", type=int, default=3, help="networks of each kind")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--speedups", type=float, nargs="+", default=[1.5, 2.0])
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = run(options)
    write_results(options.out, "residual", results, markdown(results))


if __name__ == "__main__":
    main()
