"""Which optimizer distils: a network for CIFAR-10 accelerated, then trained to the original's responses, no labels.

    python -m benchmarks.ablation.optimizers --data CIFAR
    python -m benchmarks.ablation.optimizers --data CIFAR --network vgg16 --speedup 4 --steps 1000 --device cuda

CIFAR: see benchmarks/README.md. Made with the first 3,000 training pictures and judged on the last 2,000, by the
original's own answers. Writes benchmarks/results/optimizers.json and .md.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import leanconv
from benchmarks.common import cifar10
from benchmarks.common.machine import machine
from benchmarks.common.results import RESULTS, write_results
from leanconv.evaluation.classification import agreement, logits_of
from leanconv.evaluation.paired import kl_divergence
from leanconv.train.augment import crop_and_flip

# Optimizer, rate, weight of the outputs' divergence beside the responses' distance.
WAYS = [
    *(("adam", lr, 0.0) for lr in (3e-4, 1e-3, 3e-3, 1e-2)),
    *(("muon", lr, 0.0) for lr in (1e-3, 2e-3, 3e-3, 1e-2)),
    ("muon", 3e-3, 0.03),
    ("muon", 3e-3, 0.3),
]
JUDGED = 2000


def markdown(found: dict[str, Any]) -> str:
    lines = [
        f"`python -m benchmarks.ablation.optimizers --network {found['network']} --speedup {found['speedup']:g} "
        f"--steps {found['steps']}` on {found['machine']}. CIFAR-10, {found['images']:,} pictures in batches of "
        f"{found['batch']}; {JUDGED:,} others: KL from the original's outputs, agreement with its first answers. "
        "Outputs: weight of their divergence in the loss; loss: that of the last epoch, on the pictures trained on.",
        "",
        "| optimizer | lr | outputs | KL | agreement % | loss | ms a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        end = f"{row['loss']:.4f} | {row['milliseconds']:.0f}" if row["lr"] else " | "
        way = f"{row['lr']} | {row['outputs'] or ''}" if row["lr"] else " | "
        lines.append(f"| {row['optimizer']} | {way} | {row['kl']:.4f} | {row['agreement']:.2f} | {end} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--network", choices=list(cifar10.NETWORKS), default="resnet20")
    parser.add_argument("--speedup", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=50, help="images a step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = options.device
    (pictures, _), _ = cifar10.read(options.data)
    images, others = pictures[: options.images].to(device), list(pictures[-JUDGED:].split(500))
    original = cifar10.load(options.data / f"{options.network}.safetensors", options.network).to(device)
    wanted = logits_of(original, others, device)
    result = leanconv.accelerate(
        original,
        list(images.split(500)),
        options.speedup,
        samples=150_000,
        refine="closed-form",
        ranks="sensitivity",
        progress=False,
    )
    rows: list[dict[str, Any]] = []

    def judge(model: torch.nn.Module, **facts: Any) -> None:
        logits = logits_of(model, others, device)
        rows.append({**facts, "kl": kl_divergence(logits, wanted), "agreement": 100 * agreement(logits, wanted)})
        print(rows[-1], flush=True)

    judge(result.model, optimizer="none", lr=None)
    epochs = max(1, round(options.steps * options.batch / len(images)))
    for optimizer, lr, outputs in WAYS:
        started = time.perf_counter()
        tuned = leanconv.finetune(
            result,
            images,
            original,
            optimizer=optimizer,
            lr=lr,
            outputs=outputs,
            epochs=epochs,
            batch=options.batch,
            augment=crop_and_flip(2, reflect=True),
            holdout=0.0,
            progress=False,
        )
        last = tuned.history.rows[-1]
        milliseconds = 1000 * (time.perf_counter() - started) / last.step
        judge(tuned.model, optimizer=optimizer, lr=lr, outputs=outputs, loss=last.loss, milliseconds=milliseconds)
    found = {
        "network": options.network,
        "speedup": options.speedup,
        "steps": options.steps,
        "images": len(images),
        "batch": options.batch,
        "machine": machine(device),
        "rows": rows,
    }
    write_results(options.out, "optimizers", found, markdown(found))


if __name__ == "__main__":
    main()
