"""Which plan for a stage is the fastest here: measured once, and kept in a file.

The file is ``kernels.json`` in ``$LEANCONV_CACHE``, or else in ``leanconv`` in the user's cache folder. Times measured
with another GPU, torch, Triton or version of the kernels are not used. ``LEANCONV_TUNE=0`` measures nothing and takes
the likeliest plan, which starts sooner.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import itertools
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leanconv.errors import warn
from leanconv.kernels.fused_stage import EAGER, Plan, Stage, plans, precision
from leanconv.system.atomic_files import write_whole

# Largest relative difference from torch's own operations: roundings in another order, not another answer.
CLOSE = {"tf32": 5e-3, "tf32x3": 2e-5, "bfloat16": 3e-2, "float16": 5e-3}
# Seconds spent on timing one plan, without compiling, and calls recorded together.
SPENT = 0.02
TOGETHER = 10

Attempt = Callable[[Plan], Tensor]
_chosen: dict[str, Plan] = {}


def choose(stage: Stage, device: torch.device, attempt: Attempt) -> Plan:
    """The fastest plan for ``stage``; ``attempt`` computes the stage by a plan."""
    key = f"{_machine(device)} | {stage.words}"
    plan = _chosen.get(key) or _read().get(key)
    if plan is None:
        likely = plans(stage, torch.cuda.get_device_properties(device).multi_processor_count)
        if os.environ.get("LEANCONV_TUNE") == "0":
            plan = likeliest(likely, attempt)
        elif torch.cuda.is_current_stream_capturing():
            return likeliest(likely, attempt)  # nothing can be timed while it is being recorded; a later call can
        else:
            with torch.inference_mode():
                plan = fastest(stage, likely, attempt, gpu_seconds)
            if plan is None:
                return EAGER
            _write(key, plan)
    _chosen[key] = plan
    return plan


def fastest(
    stage: Stage, likely: list[Plan], attempt: Attempt, seconds: Callable[[Callable[[], Any]], float]
) -> Plan | None:
    """The plan of ``likely`` that takes the fewest ``seconds``. Plans that fail, or answer otherwise than torch's own
    operations, are left out; None if all are."""
    expected = attempt(EAGER).double()
    scale = float(expected.norm())
    kind = precision(stage.dtype) if stage.dtype == torch.float32 else str(stage.dtype).removeprefix("torch.")
    times: dict[Plan, float] = {}
    for plan in likely:
        try:
            off = float((attempt(plan).double() - expected).norm())
        except Exception:  # too much shared memory, too many registers: compilers say so in classes of their own
            continue
        if not off <= CLOSE[kind] * scale and scale > 0:
            warn(f"a kernel answers wrongly on this GPU and is not used ({plan} for {stage.words}).")
            continue
        try:
            times[plan] = seconds(functools.partial(attempt, plan))
        except RuntimeError:  # what cannot be recorded cannot be timed either
            continue
    return min(times, key=lambda plan: times[plan], default=None)


def likeliest(likely: list[Plan], attempt: Attempt) -> Plan:
    """The first that runs at all: some need more shared memory than a GPU has."""
    for plan in likely:
        with contextlib.suppress(Exception):
            attempt(plan)
            return plan
    return EAGER


def gpu_seconds(call: Callable[[], Any]) -> float:
    """The median time of a call on the GPU. Calls are recorded in a graph: launching a short one takes longer than
    running it, and would be measured instead."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may go on using the GPU.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(TOGETHER):
            call()

    def timed(count: int) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        return [1e-3 * a.elapsed_time(b) / TOGETHER for a, b in itertools.pairwise(marks)]

    once = min(timed(2))
    return statistics.median(timed(max(3, min(20, int(SPENT / TOGETHER / max(once, 1e-6))))))


@functools.cache
def _machine(device: torch.device) -> str:
    """What a time depends on beside the stage: the GPU, the libraries, the code in this folder."""
    code = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))))
    triton = importlib.import_module("triton").__version__
    return f"{torch.cuda.get_device_name(device)} torch {torch.__version__} triton {triton} {code.hexdigest()[:12]}"


def cache_file() -> Path:
    """Where choices are kept."""
    own = os.environ.get("LEANCONV_CACHE")
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leanconv"
    return (Path(own) if own else usual) / "kernels.json"


def _read() -> dict[str, Plan]:
    """The choices in the file; none if it is missing or damaged, for they can be measured again."""
    try:
        return {key: Plan(**plan) for key, plan in json.loads(cache_file().read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError):
        return {}


def _write(key: str, plan: Plan) -> None:
    # Read again: another process may have added to it.
    choices = {name: asdict(choice) for name, choice in {**_read(), key: plan}.items()}
    with contextlib.suppress(OSError):
        cache_file().parent.mkdir(parents=True, exist_ok=True)
        write_whole(cache_file(), json.dumps(choices, indent=1) + "\n")
