"""Random layers through the kernels, shared out among processes, for ``benchmarks.kernels.run``.

Compiling takes nearly all of the time, so as many processes as there are cores do it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace as with_changes
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.vgg16 import spatial_stages, tensors, vgg16_stages
from leanconv.kernels.fused_stage import ACTIVATIONS, EAGER, Plan, Stage, plans
from leanconv.kernels.launch import run
from tests.support.kernel_cases import error

# Relative error that is allowed; of float32 with TF32.
LIMITS = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-3}


def random_stages(dtype: torch.dtype, count: int) -> list[Stage]:
    """Odd sizes, d' from 1 to 300, c from 1 to 1024, batch 1 to 65; no larger than float64 computes in a moment."""
    draw = random.Random(f"kernels {dtype}")
    found: list[Stage] = []
    while len(found) < count:
        k = draw.choice([1, 2, 3, 3, 3, 5])
        kernel = (k, k) if draw.random() < 0.8 else (k, 3)
        usual = draw.random() < 0.5
        pool = draw.random() < 0.25
        # Maps of many positions, which one of the forms is for.
        large = draw.random() < 0.2
        if large:
            kernel, usual = (k, 3), True
        # One step of one product and the second product behind it, which compilers take apart.
        short = not large and draw.random() < 0.2
        if short:
            kernel = (draw.choice([1, 2, 3]), draw.choice([1, 2, 3]))
        stage = Stage(
            dtype=dtype,
            images=draw.choice([17, 65] if large else [1, 1, 2, 3, 8, 17, 65]),
            size=(draw.randint(30, 80), draw.randint(30, 80)) if large else (draw.randint(3, 57), draw.randint(3, 57)),
            channels=draw.choice(
                [1, 3, 4, 7, 16] if short else [1, 3, 4, 7, 16, 24, 64, 65, 96, 128, 200, 256, 511, 512, 1024]
            ),
            rank=draw.choice([16, 32, 64, 128, 256]) if short else draw.randint(1, 64 if large else 300),
            filters=None if draw.random() < 0.15 else draw.randint(1, 600),
            kernel=kernel,
            stride=(1, 1) if usual else (draw.choice([1, 2, 3]), draw.choice([1, 2])),
            padding=(kernel[0] // 2, kernel[1] // 2) if usual else (draw.randint(0, 2), draw.randint(0, 2)),
            dilation=(1, 1) if usual else (draw.choice([1, 2]), draw.choice([1, 2])),
            bias=draw.random() < 0.8,
            addend=not pool and draw.random() < 0.3,
            activation=draw.choice(list(ACTIVATIONS)),
            pool=pool,
        )
        if min(stage.out_size) < 1 or (pool and any(size % 2 for size in stage.out_size)):
            continue
        if stage.positions * stage.channels * math.prod(kernel) * stage.rank < 2e10:
            found.append(stage)
    return found


def cases(count: int, dtypes: list[torch.dtype]) -> list[tuple[Stage, Plan]]:
    """Every random layer in the likeliest way and in another one."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    draw = random.Random(0)
    found = []
    for dtype in dtypes:
        for stage in random_stages(dtype, count):
            ways = [plan for plan in plans(stage, processors) if plan != EAGER]
            found += [(stage, plan) for plan in dict.fromkeys([ways[0], draw.choice(ways)])]
    return found


def of_every_kind(found: list[tuple[Stage, Plan]]) -> list[tuple[Stage, Plan]]:
    """Two of every form, dtype, pooled or not, and of more columns than one program sums up or not."""
    kinds: dict[tuple[object, ...], list[tuple[Stage, Plan]]] = {}
    for stage, plan in found:
        kind = (plan.form, stage.dtype, stage.pool, stage.columns > 256)
        kinds.setdefault(kind, []).append((stage, plan))
    return [case for some in kinds.values() for case in some[:2]]


def warm(number: int, workers: int) -> None:
    """Compile every ``workers``-th way of the layers that are timed; Triton keeps it for the other processes."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    stages = [low for batch in (64, 1) for _, _, low in vgg16_stages(batch)]
    stages += [stage for batch in (64, 1) for stage in spatial_stages(batch)]
    stages += [with_changes(low, dtype=torch.float32) for _, _, low in vgg16_stages(64)]
    torch.backends.cudnn.allow_tf32 = False  # as float32 is timed
    ways = [(stage, plan) for stage in stages for plan in plans(stage, processors) if plan != EAGER]
    for stage, plan in ways[number::workers]:
        with contextlib.suppress(Exception):  # what does not fit is seen again where it is timed
            run(stage, plan, *tensors(stage))


def compare(given: list[tuple[Stage, Plan]], out: Path) -> None:
    """A line of JSON each."""
    with out.open("w") as file:
        for stage, plan in given:
            found: dict[str, Any] = {"stage": stage.words, "dtype": str(stage.dtype)[6:], "plan": vars(plan)}
            try:
                found["error"] = error(stage, plan, "cuda")
                found["right"] = found["error"] <= LIMITS[stage.dtype]
            except Exception as problem:
                found |= {"right": False, "problem": f"{type(problem).__name__}: {problem}"[:300]}
            # What needs more shared memory or registers than there is does not run, and is never chosen.
            found["runs"] = "OutOfResources" not in found.get("problem", "")
            file.write(json.dumps(found) + "\n")
            file.flush()


def shared_out(kind: str, count: int, folder: Path, seconds: float) -> list[Path]:
    """Run the work in several processes, which end with it or after ``seconds``; returns the files they write."""
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    files = [folder / f"{number}.jsonl" for number in range(workers)]
    command = [sys.executable, "-m", "benchmarks.kernels.check", kind]
    started = [
        subprocess.Popen([*command, str(number), str(workers), str(count), str(file)])
        for number, file in enumerate(files)
    ]
    end = time.monotonic() + seconds
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, end - time.monotonic()))
    for process in started:
        process.kill()
        process.wait()
    return files


def check(report: dict[str, Any], seconds: float, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = shared_out("check", count, Path(folder), seconds)
        lines = [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines() if line]
    ran = [line for line in lines if line["runs"]]
    report["check"] = {
        "cases": len(ran),
        "layers": len({line["stage"] for line in ran}),
        "wrong": [line for line in ran if not line["right"]],
        "did not fit": len(lines) - len(ran),
        "largest error": {
            dtype: max((line.get("error", math.inf) for line in ran if line["dtype"] == dtype), default=None)
            for dtype in (str(one)[6:] for one in LIMITS)
        },
        "by form": {
            form: sum(line["plan"]["form"] == form for line in ran) for form in ("conv", "pair", "shifted", "split")
        },
    }


def sanitizer(report: dict[str, Any], seconds: float) -> None:
    """Reads and writes outside of what was allocated, in cases of every kind. torch's allocator, which would hide them,
    is switched off."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        report["sanitizer"] = "compute-sanitizer is not installed here"
        return
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with tempfile.TemporaryDirectory() as folder:
        own = [sys.executable, "-m", "benchmarks.kernels.check", "kinds", "0", "1", "200", f"{folder}/out"]
        try:
            done = subprocess.run(
                [tool, "--tool", "memcheck", *own], capture_output=True, text=True, timeout=seconds, env=environment
            )
            said = [line for line in done.stdout.splitlines() if line.startswith("=========")]
            report["sanitizer"] = {"cases": len(Path(folder, "out").read_text().splitlines()), "said": said[-12:]}
        except subprocess.TimeoutExpired:
            written = Path(folder, "out").read_text().splitlines() if Path(folder, "out").exists() else []
            report["sanitizer"] = {"cases": len(written), "said": ["stopped at its time limit"]}


if __name__ == "__main__":
    kind, number, workers, count, file = sys.argv[1:]
    if kind == "warm":
        warm(int(number), int(workers))
    else:
        every = cases(int(count), list(LIMITS))
        given = of_every_kind(every) if kind == "kinds" else every
        compare(given[int(number) :: int(workers)], Path(file))
