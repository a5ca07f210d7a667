"""How far the nonlinear solver is from its arithmetic limit, on one large layer.

    python -m benchmarks.paper.solver [--device cpu|cuda]

d = 512 filters, n = 30,000 samples, rank 128, 50 iterations without early stop. The unit is one float32 product
of 512 x 30000 by 30000 x 512, timed in the same run. An iteration needs 1.5 units of arithmetic: (z - y) y^T is one,
P (Q^T y) half of one; so 75 units is the limit. On a GPU the solver's own products are in TF32, several times faster
than the unit; the row "exact products" is without, and shows what that does to the error. Eight eigenproblems, one by
one and as a stack, show whether torch gains from stacking them. Writes benchmarks/results/solver-DEVICE.json and .md.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import leanconv
from benchmarks.common.results import RESULTS, write_results
from leanconv.solve import activation, nonlinear

D, N, RANK = 512, 30_000, 128


def responses(device: str) -> Tensor:
    """Correlated responses with eigenvalues falling over four decades, as a convolution's do."""
    g = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(D, D, generator=g))
    scale = torch.logspace(0, -2, D)
    return ((torch.randn(N, D, generator=g) * scale) @ basis.T - 0.1).to(device)


def seconds(work: Callable[[], Any], repeats: int, device: str) -> float:
    """Median wall time, the device idle before and after."""

    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    times = []
    for number in range(repeats + 1):
        wait()
        started = time.perf_counter()
        work()
        wait()
        if number:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = options.device
    y = responses(device)
    left, right = torch.randn(D, N, device=device), torch.randn(N, D, device=device)
    relu = activation("relu")
    # The unit before and after, so that a machine that slows down in between shows.
    before = seconds(lambda: left @ right, 9, device)
    full = seconds(lambda: nonlinear(y, y, RANK, relu, tolerance=None), options.repeats, device)
    early = seconds(lambda: nonlinear(y, y, RANK, relu), options.repeats, device)
    with patch.object(sys.modules["leanconv.solve.nonlinear"], "quick_products", lambda device: nullcontext()):
        exact = seconds(lambda: nonlinear(y, y, RANK, relu), options.repeats, device)
        exact_fit = nonlinear(y, y, RANK, relu)
    after = seconds(lambda: left @ right, 9, device)
    small = torch.stack([y[:8000, :size].T.double() @ y[:8000, :size].double() for size in (256,) * 8])
    eigen = {
        "size": 256,
        "one_by_one_seconds": seconds(lambda: [torch.linalg.eigh(matrix) for matrix in small], 3, device),
        "stacked_seconds": seconds(lambda: torch.linalg.eigh(small), 3, device),
    }
    unit = (before + after) / 2
    fits = nonlinear(y, y, RANK, relu, tolerance=None), nonlinear(y, y, RANK, relu)
    found = {
        "script": "benchmarks/paper/solver.py",
        "machine": torch.cuda.get_device_name() if device.startswith("cuda") else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "leanconv": leanconv.__version__,
        "unit_seconds": {"before": before, "after": after},
        "limit_units": 75,
        "full": {"seconds": full, "units": full / unit, "iterations": fits[0].iterations, "error": fits[0].error},
        "early_stop": {
            "seconds": early,
            "units": early / unit,
            "iterations": fits[1].iterations,
            "error": fits[1].error,
        },
        "exact_products": {
            "seconds": exact,
            "units": exact / unit,
            "iterations": exact_fit.iterations,
            "error": exact_fit.error,
        },
        "eight_eigenproblems": eigen,
        "linear_error": fits[0].errors[0],
    }
    lines = [
        f"`benchmarks/paper/solver.py` on {found['machine']}, {found['threads']} threads, torch {found['torch']}: "
        f"d = {D}, n = {N}, rank {RANK}. One product of {D} x {N} by {N} x {D} takes {1000 * unit:.2f} ms; "
        "50 iterations need 75.",
        "",
        "| | seconds | products | iterations | squared error / linear |",
        "|---|---|---|---|---|",
    ]
    for name, key in (
        ("early stop off", "full"),
        ("default", "early_stop"),
        ("default, exact products", "exact_products"),
    ):
        row: Any = found[key]
        lines.append(
            f"| {name} | {row['seconds']:.2f} | {row['units']:.1f} | {row['iterations']} | "
            f"{row['error'] / fits[0].errors[0]:.5f} |"
        )
    lines += [
        "",
        f"Eight eigenproblems of 256 x 256, float64: {1000 * eigen['one_by_one_seconds']:.1f} ms one by one, "
        f"{1000 * eigen['stacked_seconds']:.1f} ms as a stack.",
    ]
    stem = f"solver-{device.partition(':')[0]}"
    write_results(options.out, stem, found, "\n".join(lines))


if __name__ == "__main__":
    main()
