"""How many images: VGG-16 at 4x from few of them to all, by the paper's fit and by refine="closed-form".

    python benchmarks/few_images.py --data DIR --device cuda

DIR is that of paper.py. Seeds draw other images. Writes benchmarks/results/few_images.json and .md.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from keeping import RESULTS, keep
from paper_data import SUBJECTS
from vgg16_imagenet import machine

import leanconv

REFINE = ("none", "closed-form")


def markdown(cells: list[dict[str, Any]]) -> str:
    """A row for every number of images, seeds together."""
    lines = [
        f"`python benchmarks/few_images.py` on {cells[0]['machine']}. VGG-16 at {cells[0]['speedup']:g}x, 3d, by "
        "number of calibration images: increase of the top-5 error in points, KL from the original's outputs; medians "
        f"over {len({cell['seed'] for cell in cells})} draws.",
        "",
        "| images | the paper's fit | KL | closed form | KL |",
        "|---|---|---|---|---|",
    ]
    for count in sorted({cell["images"] for cell in cells}):
        row = [f"{count:,}"]
        for refine in REFINE:
            own = [cell for cell in cells if (cell["images"], cell["refine"]) == (count, refine)]
            row += [
                f"{statistics.median(cell[key] for cell in own):{form}}"
                for key, form in (("increase", ".1f"), ("kl", ".3f"))
            ]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--counts", nargs="+", type=int, default=[30, 60, 125, 250, 500, 1000])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--speedup", type=float, default=4.0)
    parser.add_argument("--limit", type=int, help="pictures, for a trial")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    subject = SUBJECTS["vgg16-imagenet"](options.data, options.device, options.limit)
    images, cells = torch.cat(subject.calibration), []
    for seed in options.seeds:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed)).to(images.device)
        for count in options.counts:
            for refine in REFINE:
                batches = list(images[order[:count]].split(50))
                result = leanconv.accelerate(
                    subject.model, batches, options.speedup, refine=refine, progress=False, device=options.device
                )
                score = subject.score(result.model)
                cell = {
                    "images": len(images[order[:count]]),
                    "refine": refine,
                    "seed": seed,
                    "speedup": options.speedup,
                    "increase": subject.increase(score),
                    "low": 100 * score.low,
                    "high": 100 * score.high,
                    "kl": score.kl,
                    "machine": machine(options.device),
                }
                cells.append(cell)
                print(
                    f"{cell['images']} images, {refine}, seed {seed}: {cell['increase']:.1f}, KL {cell['kl']:.3f}",
                    flush=True,
                )
    keep(options.out, "few_images", cells, markdown(cells))


if __name__ == "__main__":
    main()
