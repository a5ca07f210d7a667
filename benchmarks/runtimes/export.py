"""ONNX files of accelerated networks against torch: twelve families of the zoo, in onnxruntime, on two batch sizes.

    python -m benchmarks.runtimes.export

Networks have random weights and are accelerated a little, Linear layers included. Writes benchmarks/results/export.json
and .md.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import leanconv
from benchmarks.common.results import RESULTS, write_results
from benchmarks.zoo.models import SLICE, Entry, entries
from leanconv.runtimes.bench.machine import machine

# Largest relative difference from torch that is allowed.
ALLOWED = 1e-4


def measured(entry: Entry) -> dict[str, Any]:
    torch.manual_seed(0)
    model, images = entry.build().eval(), torch.randn(8, 3, entry.size, entry.size)
    target = min(1.3, 0.99 * leanconv.reachable(model, images[:1], layers="all"))
    result = leanconv.accelerate(
        model, images, target, layers="all", solver="linear", refine="none", samples=500, progress=False
    )
    with tempfile.TemporaryDirectory() as place:
        written = leanconv.export(result.model, images[:2], Path(place) / "network.onnx")
    return {
        "network": entry.key,
        "family": entry.family,
        "speedup": result.speedup,
        "replaced": len(result.layers),
        "shapes": [list(shape) for shape in written.checked],
        "difference": written.difference,
    }


def markdown(found: dict[str, Any]) -> str:
    about = found["machine"]
    lines = [
        f"`python -m benchmarks.runtimes.export` on {about['cpu']}, torch {about['torch']}, "
        f"onnxruntime {about['onnxruntime']}: accelerated networks with random weights as ONNX files, "
        f"largest difference from torch relative to the largest output, over all shapes; {ALLOWED:g} is allowed.",
        "",
        "| network | family | fewer MACs | layers replaced | shapes | difference |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        shapes = ", ".join(" x ".join(map(str, shape)) for shape in row["shapes"])
        lines.append(
            f"| {row['network']} | {row['family']} | {row['speedup']:.2f}x | {row['replaced']} | {shapes} | "
            f"{row['difference']:.1e} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SLICE, default=SLICE)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    known, rows = {entry.key: entry for entry in entries()}, []
    for key in options.only:
        started = time.perf_counter()
        rows.append(measured(known[key]))
        print(f"{key}: {rows[-1]['difference']:.1e} in {time.perf_counter() - started:.0f} s", flush=True)
    found = {
        "script": "benchmarks/runtimes/export.py",
        "machine": machine(torch.device("cpu"), torch.get_num_threads()),
        "leanconv": leanconv.__version__,
        "rows": rows,
    }
    write_results(options.out, "export", found, markdown(found))


if __name__ == "__main__":
    main()
