"""leanconv and other libraries: same network, same pictures, same MACs, no labels, no training.

    python -m benchmarks.peers.run --data DIR --model vgg16-imagenet --work WORK
    python -m benchmarks.peers.run --data CIFAR --model resnet20-cifar10 --work WORK

DIR and CIFAR: see benchmarks/README.md. The ResNet-20 of the committed table was trained on a CPU (`python -m
benchmarks.common.cifar10 --network resnet20 --epochs 15 --batch 128`) and is not that of the ablation. In an
environment of their own, the others come with `pip install aimet-torch osqp torch-pruning tensorly-torch tensorly`; one
that is missing is left out, with a line that says so. Each is asked for the same number of MACs of convolutions,
counted alike for all (torch's FlopCounterMode), in the way its documentation recommends where there is no training:

- AIMET: spatial SVD, ranks by its automatic mode, which asks the user how good a network is: minus the KL divergence of
  its outputs from the original's, on a part of the pictures (JUDGES; every layer is tried at nine ranks).
- Torch-Pruning: group norm, pruned globally, by a ratio found by bisection. It is meant to be trained afterwards.
- tensorly-torch: Tucker decomposition of every filter but the first layer's, all channel ranks the same share.

Pruning and decomposing change what batch norms see: a second row of each has their statistics measured anew on the same
pictures, which costs it nothing. leanconv folds batch norms and has no such row. Rows found are files in WORK, and are
not computed again. Writes results/peers.json and .md, of all rows in WORK. All of it runs on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import leanconv
from benchmarks.common.machine import machine
from benchmarks.common.results import RESULTS, slug, write_results
from benchmarks.common.subjects import NETWORKS, Subject
from leanconv.evaluation.classification import logits_of
from leanconv.evaluation.paired import kl_divergence
from leanconv.system.atomic_files import write_whole

SPEEDUPS = {"vgg16-imagenet": (2.0, 4.0), "vgg16-cifar10": (2.0, 4.0), "resnet20-cifar10": (1.5, 2.0)}
JUDGES = {"vgg16-imagenet": 50, "vgg16-cifar10": 500, "resnet20-cifar10": 500}  # pictures AIMET's search judges by


class CannotCut(Exception):
    """The speed-up asked for cannot be had in this way."""


def conv_macs(model: nn.Module, subject: Subject) -> int:
    """Of one picture, those of convolutions alone, however they are written."""
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(subject.calibration[0][:1])
    counts = counter.get_flop_counts()["Global"]
    return sum(flops for op, flops in counts.items() if "convolution" in str(op)) // 2


def by_leanconv(**arguments: Any) -> Callable[[Subject, float], nn.Module]:
    def made(subject: Subject, speedup: float) -> nn.Module:
        result = leanconv.accelerate(subject.model, subject.calibration, speedup, progress=False, **arguments)
        return result.model

    return made


def by_aimet(subject: Subject, speedup: float) -> nn.Module:
    from aimet_torch.common.defs import CompressionScheme, CostMetric, GreedySelectionParameters
    from aimet_torch.compress import ModelCompressor
    from aimet_torch.defs import SpatialSvdParameters

    model = copy.deepcopy(subject.model)
    pictures = list(torch.cat(subject.calibration)[: JUDGES[subject.name]].split(50))
    wanted = logits_of(subject.model, pictures, subject.device)

    def judged(network: nn.Module, iterations: int | None, use_cuda: bool) -> float:
        return -kl_divergence(logits_of(network, pictures, subject.device), wanted)

    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    greedy = GreedySelectionParameters(target_comp_ratio=1 / speedup, num_comp_ratio_candidates=10)
    automatic = SpatialSvdParameters.AutoModeParams(greedy, modules_to_ignore=[first])
    compressed, _ = ModelCompressor.compress_model(
        model,
        eval_callback=judged,
        eval_iterations=None,
        input_shape=(1, *pictures[0].shape[1:]),
        compress_scheme=CompressionScheme.spatial_svd,
        cost_metric=CostMetric.mac,
        parameters=SpatialSvdParameters(SpatialSvdParameters.Mode.auto, automatic),
    )
    found: nn.Module = compressed
    return found.eval()


def least_cut(made: Callable[[float], nn.Module], subject: Subject, speedup: float) -> nn.Module:
    """Of the networks ``made`` by how much is taken away, 0 to 1, the first that has ``speedup`` times fewer MACs;
    CannotCut if none has."""
    most, low, high = conv_macs(subject.model, subject) / speedup, 0.0, 0.95
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if conv_macs(made(middle), subject) > most else (low, middle)
    found = made(high)
    if conv_macs(found, subject) > most:
        raise CannotCut(f"{speedup:g}x cannot be had in this way: so much is left whatever is taken away.")
    return found


def by_torch_pruning(subject: Subject, speedup: float) -> nn.Module:
    import torch_pruning

    def pruned(ratio: float) -> nn.Module:
        model = copy.deepcopy(subject.model)
        torch_pruning.pruner.BasePruner(
            model,
            subject.calibration[0][:1],
            importance=torch_pruning.importance.GroupMagnitudeImportance(p=2),
            global_pruning=True,
            pruning_ratio=ratio,
            max_pruning_ratio=0.9,  # no layer is pruned away
            ignored_layers=[module for module in model.modules() if isinstance(module, nn.Linear)],
        ).step()
        return model.eval()

    return least_cut(pruned, subject, speedup)


def by_tensorly(subject: Subject, speedup: float) -> nn.Module:
    import tltorch

    def decomposed(ratio: float) -> nn.Module:
        model = copy.deepcopy(subject.model)
        convolutions = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
        for name, layer in convolutions[1:]:
            if layer.kernel_size == (1, 1):
                continue
            d, c = (max(1, round((1 - ratio) * channels)) for channels in (layer.out_channels, layer.in_channels))
            factored = tltorch.FactorizedConv.from_conv(
                layer, rank=(d, c, *layer.kernel_size), factorization="tucker", implementation="factorized"
            )
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, factored)
        return model.eval()

    return least_cut(decomposed, subject, speedup)


WAYS: dict[str, tuple[str | None, Callable[[Subject, float], nn.Module]]] = {
    "leanconv": (None, by_leanconv()),
    'leanconv, `ranks="sensitivity"`': (None, by_leanconv(ranks="sensitivity")),
    "AIMET spatial SVD": ("aimet-torch", by_aimet),
    "Torch-Pruning": ("torch-pruning", by_torch_pruning),
    "tensorly-torch Tucker": ("tensorly-torch", by_tensorly),
}


@torch.no_grad()
def norms_measured_anew(model: nn.Module, subject: Subject) -> nn.Module | None:
    """With batch norms' statistics those of the calibration pictures; None where there is no batch norm."""
    model = copy.deepcopy(model)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean of all batches
        norm.train()
    for batch in subject.calibration:
        model(batch)
    return model.eval() if norms else None


def rows_of(subject: Subject, speedup: float, way: str) -> list[dict[str, Any]]:
    package, made = WAYS[way]
    model = made(subject, speedup)
    rows = []
    for norms, network in (("", model), (", norms anew", norms_measured_anew(model, subject) if package else None)):
        if network is None:
            continue
        score = subject.score(network)
        rows.append(
            {
                "model": subject.name,
                "asked": speedup,
                "way": way + norms,
                "version": package and importlib.metadata.version(package),
                "macs": conv_macs(subject.model, subject) / conv_macs(network, subject),
                "increase": subject.increase(score),
                "low": 100 * score.low,
                "high": 100 * score.high,
                "agreement": 100 * score.agreement,
                "kl": score.kl,
                "machine": machine(subject.device),
                "pictures": [sum(map(len, part)) for part in (subject.calibration, subject.pictures)],
                "original": {"error": subject.error, subject.error: 100 * getattr(subject.base, subject.error)},
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table for every network, nearest to the original first."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        versions = sorted({f"{row['way'].partition(',')[0]} {row['version']}" for row in own if row["version"]})
        (given, judged), original = own[0]["pictures"], own[0]["original"]
        error = original["error"]
        lines += [
            f"`python -m benchmarks.peers.run --model {model}` on {own[0]['machine']}; {', '.join(versions)}. "
            f"{given:,} pictures, no labels, no training; judged on {judged:,} others. Original: {error} "
            f"{original[error]:.2f} %. Convolution MACs before / after, counted by torch; points lost, with their 95 % "
            "interval; agreement with the original's first answers, KL of the outputs from its own.",
            "",
            f"| asked | | MACs | {error} lost, points | 95 % | agreement % | KL |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['asked']:g}x | {row['way']} | {row['macs']:.2f}x | {row['increase']:.2f} | {row['low']:.1f} to "
            f"{row['high']:.1f} | {row['agreement']:.1f} | {row['kl']:.3f} |"
            for row in sorted(own, key=lambda row: (row["asked"], row["kl"]))
        ]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", nargs="+", choices=list(SPEEDUPS), default=list(SPEEDUPS))
    parser.add_argument("--speedups", nargs="+", type=float, help="default: those of the network's table")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--limit", type=int, help="pictures to calibrate with, and to judge by")
    parser.add_argument("--work", type=Path, required=True, help="folder of rows that are not computed again")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    for name in options.model:
        subject = NETWORKS[name](options.data, "cpu", options.limit)
        for speedup in options.speedups or SPEEDUPS[name]:
            for way in options.ways:
                file = options.work / f"{name}-{speedup:g}-{slug(way)}.json"
                if file.exists():
                    continue
                try:
                    found = rows_of(subject, speedup, way)
                except (ModuleNotFoundError, CannotCut) as error:
                    print(f"{way} is left out: {error}", flush=True)
                    continue
                write_whole(file, json.dumps(found) + "\n")
                for row in found:
                    print(
                        f"{name} {row['way']}: {row['macs']:.2f}x, {row['increase']:.2f} points, KL {row['kl']:.4f}",
                        flush=True,
                    )
    rows = [row for file in sorted(options.work.glob("*.json")) for row in json.loads(file.read_text())]
    write_results(options.out, "peers", rows, markdown(rows))


if __name__ == "__main__":
    main()
