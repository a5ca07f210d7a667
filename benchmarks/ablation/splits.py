"""Spatial splits fitted to patches (ThreeD(sweeps=...)): how much of a layer's responses they lose on other pictures.

    python -m benchmarks.ablation.splits --data DIR

DIR: see benchmarks/README.md. Of calibration pictures, two thirds to fit to and a third to judge by, POSITIONS
patches each are taken of some of VGG-16's layers. These are split at the rank that makes the pair cost a quarter of the
layer: by singular values, with the horizontal half regressed on its inputs, and with both halves fitted in turns; with
several shares of white patches beside the real ones (leanconv.solve.spatial_als.WHITE is one). Evaluation pictures are
not used. Writes
benchmarks/results/splits.json and .md.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common.machine import machine
from benchmarks.common.results import RESULTS, write_results
from benchmarks.common.vgg16_probe import read_pictures, vgg16_probe
from leanconv.solve import Moments, SpatialFactors, spatial_basis, swept

LAYERS = ("features.12", "features.19", "features.26")
POSITIONS = 24  # of a picture
WHITES = (0.01, 0.1, 1.0)
SWEEPS = (0, 1, 2, 3, 8)


class Enough(Exception):
    """The last layer has seen its input."""


def patches_of(x: Tensor, generator: torch.Generator) -> Tensor:
    """Of 3 x 3 with a padding of 1, at POSITIONS of each map: n x (c 3 3)."""
    images, _, height, width = x.shape
    x = F.pad(x, (1, 1, 1, 1))
    rows, columns = (torch.randint(0, side, (images, POSITIONS), generator=generator) for side in (height, width))
    windows = x.unfold(2, 3, 1).unfold(3, 3, 1)  # images x c x rows x columns x 3 x 3
    return windows[torch.arange(images)[:, None], :, rows, columns].flatten(0, 1).flatten(1)


def seen(model: nn.Module, pictures: Tensor, layers: list[str]) -> dict[str, Tensor]:
    found: dict[str, list[Tensor]] = {name: [] for name in layers}
    generator = torch.Generator().manual_seed(0)

    def listened(name: str) -> Any:
        def hook(_: nn.Module, given: tuple[Tensor]) -> None:
            found[name].append(patches_of(given[0], generator))
            if name == layers[-1]:
                raise Enough

        return model.get_submodule(name).register_forward_pre_hook(hook)

    handles = [listened(name) for name in layers]
    try:
        with torch.inference_mode():
            for batch in pictures.split(20):
                with suppress(Enough):
                    model(batch)
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


def left(weight: Tensor, split: SpatialFactors, patches: Tensor) -> float:
    """Share of the energy of centred responses that the split does not give."""
    x = patches - patches.mean(0)
    apart, whole = (x @ filters.flatten(1).T for filters in (weight - split.product(), weight))
    return float(apart.square().sum() / whole.square().sum())


def rows_of(name: str, weight: Tensor, patches: Tensor) -> list[dict[str, Any]]:
    d, c = weight.shape[:2]
    rank = round(0.25 * 9 * c * d / (3 * (c + d)))
    pictures = len(patches) // POSITIONS
    fitted, judged = patches.split([pictures * 2 // 3 * POSITIONS, len(patches) - pictures * 2 // 3 * POSITIONS])
    split, moments = spatial_basis(weight).split(rank), Moments.of(fitted)
    rows = []
    for white in WHITES:
        found: dict[str, Any] = {"layer": name, "rank": rank, "white": white, "singular": left(weight, split, judged)}
        with patch("leanconv.solve.spatial_als.WHITE", white):
            for sweeps in SWEEPS:
                started = time.perf_counter()
                found[f"{sweeps}"] = left(weight, swept(split, weight, moments, sweeps), judged)
                found["seconds"] = time.perf_counter() - started
        rows.append(found)
        print(found, flush=True)
    return rows


def markdown(data: dict[str, Any]) -> str:
    heads = ["layer", "d''", "white", "singular values", "horizontal half regressed"]
    heads += [f"{sweeps} sweep{'s' * (sweeps > 1)}" for sweeps in SWEEPS[1:]]
    fitted, judged = data["pictures"]
    lines = [
        f"`python -m benchmarks.ablation.splits` on {data['machine']}. VGG-16, splits that cost a quarter of their "
        f"layer: share of the responses' energy that is lost on {judged:,} calibration pictures, {POSITIONS} patches "
        f"each, fitted to {fitted:,} others and a share of white patches beside them.",
        "",
        "| " + " | ".join(heads) + " |",
        "|---" * len(heads) + "|",
    ]
    for row in data["rows"]:
        values = [f"{row[key]:.4f}" for key in ("singular", *map(str, SWEEPS))]
        lines.append(f"| {row['layer']} | {row['rank']} | {row['white']:g} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), help="3 x 3, in the order of the network")
    parser.add_argument("--limit", type=int, default=600, help="calibration pictures")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    batches, _ = read_pictures(
        options.data / "calib.tar", options.limit, json.loads((options.data / "classes.json").read_text())
    )
    pictures = torch.cat(batches)
    pictures = pictures[torch.randperm(len(pictures), generator=torch.Generator().manual_seed(0))]
    model = vgg16_probe(options.data / "vgg16_probe.safetensors")
    weights = {name: model.get_submodule(name).weight.detach() for name in options.layers}
    rows = [
        row
        for name, found in seen(model, pictures, options.layers).items()
        for row in rows_of(name, weights[name], found)
    ]
    fitted = len(pictures) * 2 // 3
    data = {"machine": machine("cpu"), "pictures": [fitted, len(pictures) - fitted], "rows": rows}
    write_results(options.out, "splits", data, markdown(data))


if __name__ == "__main__":
    main()
