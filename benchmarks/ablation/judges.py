"""By which images distillation is judged: a tenth the layers were fitted to as well, or one that was put aside before.

    python -m benchmarks.ablation.judges --work WORK
    python -m benchmarks.ablation.judges --work WORK --data CIFAR     # and ResNet-20

The networks are that of `leanconv demo` and, with CIFAR (see benchmarks/README.md), ResNet-20 for CIFAR-10. Both are
judged by other pictures of the training sets. distill.FEW says for how many images a tenth is put aside; here it is for
none and for all. Each cell is a file in WORK and is not computed again. Writes benchmarks/results/judges.json and .md.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import leanconv
from benchmarks.common import cifar10
from benchmarks.common.machine import machine
from benchmarks.common.results import RESULTS, write_results
from leanconv.demo import digits, train
from leanconv.evaluation.classification import logits_of
from leanconv.evaluation.paired import kl_divergence
from leanconv.system.atomic_files import write_whole

CELLS = {
    "digits": ((20, 4.0), (40, 4.0), (150, 1.3), (300, 1.1), (300, 1.3), (500, 1.3), (1000, 1.3)),
    "resnet20": ((100, 2.0), (500, 2.0), (1000, 1.3)),
}
WAYS = {"closed form": None, "fitted to as well": 0, "put aside": 10**9}


@dataclass
class Case:
    model: nn.Module
    images: Tensor
    others: list[Tensor]


def case(name: str, data: Path | None) -> Case:
    if name == "digits":
        pictures, labels = digits()
        return Case(train(pictures[:1000], labels[:1000], epochs=6), pictures[:1000], [pictures[1000:]])
    assert data is not None
    (pictures, _), _ = cifar10.read(data)
    return Case(cifar10.load(data / "resnet20.safetensors", name), pictures[:3000], list(pictures[-2000:].split(500)))


def cell(subject: Case, images: int, speedup: float, few: int | None) -> dict[str, Any]:
    chosen = subject.images[torch.randperm(len(subject.images), generator=torch.Generator().manual_seed(0))[:images]]
    with patch("leanconv.train.distill.FEW", few or 0):
        way = "closed-form" if few is None else "distill"
        result = leanconv.accelerate(subject.model, chosen, speedup, refine=way, progress=False)
    logits, wanted = (logits_of(network, subject.others, "cpu") for network in (result.model, subject.model))
    history = (result.training or {}).get("history", {})
    return {"kl": kl_divergence(logits, wanted), "best": history.get("best"), "machine": machine("cpu")}


def markdown(cells: list[dict[str, Any]]) -> str:
    lines = [
        f"`python -m benchmarks.ablation.judges` on {cells[0]['machine']}. KL from the original's outputs on pictures "
        "not seen, in thousandths, and the step whose weights were kept (0: those of the closed form).",
        "",
        "| network | images | speed-up | closed form | judged by images fitted to | by images put aside |",
        "|---|---|---|---|---|---|",
    ]
    for name, pairs in CELLS.items():
        for images, speedup in pairs:
            own = {
                one["way"]: one
                for one in cells
                if (one["network"], one["images"], one["speedup"]) == (name, images, speedup)
            }
            if len(own) == len(WAYS):
                shown = [f"{1000 * own[way]['kl']:.3g}" for way in WAYS]
                kept = [f" ({own[way]['best']})" if few is not None else "" for way, few in WAYS.items()]
                row = [name, str(images), f"{speedup:g}x", *(a + b for a, b in zip(shown, kept, strict=True))]
                lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="CIFAR-10 and resnet20.safetensors; without, digits alone")
    parser.add_argument("--work", type=Path, required=True, help="folder of the cells")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    for name in CELLS if options.data else ("digits",):
        subject = case(name, options.data)
        for images, speedup in CELLS[name]:
            for way, few in WAYS.items():
                file = options.work / f"{name}-{images}-{speedup:g}-{way.replace(' ', '-')}.json"
                if file.exists():
                    continue
                found = {"network": name, "images": images, "speedup": speedup, "way": way}
                found |= cell(subject, images, speedup, few)
                write_whole(file, json.dumps(found) + "\n")
                print(f"{name} {images} {speedup:g}x {way}: KL {found['kl']:.5f}, step {found['best']}", flush=True)
    cells = [json.loads(file.read_text()) for file in sorted(options.work.glob("*.json"))]
    write_results(options.out, "judges", cells, markdown(cells))


if __name__ == "__main__":
    main()
