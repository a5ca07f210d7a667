"""The fused kernels on a GPU: are they right, and how fast are VGG-16's convolutions with them?

    python -m benchmarks.kernels.run                          # everything, from the root of the repository
    python -m benchmarks.kernels.run --parts check sanitizer
    python -m benchmarks.kernels.run --parts layers stacks compiled --seconds 400

check      200 random layers a dtype against float64, the output between guards and filled with NaN before; by several
           processes, whose time goes into compiling
sanitizer  a few of them under compute-sanitizer, where it is installed
layers     every layer of VGG-16 at 4x, 224 px: torch's own operations, and every way the kernels have of computing it
stacks     all convolutions: the original and the accelerated network, operation by operation, fused, in CUDA graphs
compiled   the same networks under torch.compile(mode="max-autotune"), timed again beside the others

Weights are random: time does not depend on them. Every part stops at its share of --seconds and what was found by then
is written: benchmarks/results/kernels.json and .md. Parts that ran there before, and are not asked for, stay in it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import nn

from benchmarks.common.results import RESULTS
from benchmarks.kernels.check import check, sanitizer, shared_out
from benchmarks.kernels.tables import markdown
from benchmarks.kernels.vgg16 import limit, networks, print_limits, tensors, vgg16_stages
from leanconv.kernels import optimize_
from leanconv.kernels.eager import run_eagerly
from leanconv.kernels.fused_stage import plans
from leanconv.kernels.launch import run
from leanconv.kernels.tune import cache_file, gpu_seconds

# Share of the time a part may take, and seconds one compiled network may.
SHARES = {"check": 0.4, "sanitizer": 0.3, "layers": 0.3, "stacks": 0.35, "compiled": 1.0}
COMPILING = 170


class OutOfTime(BaseException):
    """A part or a network took longer than it may. Not an Exception: those of a kernel that fails are caught."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def seconds_of(call: Callable[[], Any], spent: float = 0.1) -> float:
    call()
    torch.cuda.synchronize()

    def timed(count: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        return 1e-3 * start.elapsed_time(end) / count

    once = timed(2)
    count = max(2, min(200, int(spent / 5 / max(once, 1e-6))))
    return statistics.median(timed(count) for _ in range(5))


def layers(report: dict[str, Any], end: float, save: Callable[[], None]) -> None:
    """Every layer by itself, batch 64 and then 1."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for batch in (64, 1):
        found = report.setdefault("layers", {}).setdefault(f"batch {batch}", [])
        for name, dense, low in vgg16_stages(batch):
            if time.monotonic() > end:
                raise OutOfTime
            given = tensors(dense)
            with torch.backends.cudnn.flags(enabled=True, benchmark=True):
                run_eagerly(dense, *given)
                original = gpu_seconds(lambda dense=dense, given=given: run_eagerly(dense, *given))
            given = tensors(low)
            wanted = run_eagerly(low, *given).float()
            ways: list[dict[str, Any]] = []
            for plan in plans(low, processors):
                try:
                    off = float((run(low, plan, *given).float() - wanted).norm() / wanted.norm())
                    taken = gpu_seconds(lambda plan=plan, low=low, given=given: run(low, plan, *given))
                    ways.append({**vars(plan), "seconds": taken, "difference": off})
                except OutOfTime:
                    raise
                except Exception as problem:
                    ways.append({**vars(plan), "problem": f"{type(problem).__name__}: {problem}"[:200]})
            ran = [way for way in ways if "seconds" in way]
            best = min(ran, key=lambda way: way["seconds"])
            row = {
                "layer": name,
                "ranks": [low.channels, low.rank, low.filters],
                "original": original,
                "accelerated": next(way["seconds"] for way in ran if way["form"] == "eager"),
                "fused": min((way["seconds"] for way in ran if way["form"] != "eager"), default=None),
                "best": {
                    key: best[key] for key in ("form", "block_m", "block_k", "block_n", "warps", "depth", "share")
                },
                "limit": limit(low),
                "ways": ways,
            }
            found.append(row)
            save()
            fused = row["fused"] or math.nan
            print(f"{name} b{batch}: {1e6 * original:.0f} -> {1e6 * fused:.0f} us {best['form']}", flush=True)


class Setting:
    """Networks under the same conditions; calls that were made are kept and timed in turn."""

    def __init__(self, name: str, dtype: torch.dtype, batch: int, tf32: bool) -> None:
        self.name, self.dtype, self.batch, self.tf32 = name, dtype, batch, tf32
        self.calls: dict[str, Callable[[], Any]] = {}
        self.models: list[nn.Module] = []  # a recorded graph reads weights where they lie, and does not keep them
        self.problems: dict[str, str] = {}
        self.x = torch.randn(batch, 3, 224, 224, device="cuda", dtype=dtype).contiguous(
            memory_format=torch.channels_last
        )

    def placed(self, network: str, scheme: str) -> nn.Module:
        # Weights made in inference mode could change unseen and would be packed at every call.
        with torch.inference_mode(False):
            original, accelerated, _ = networks("channel" if scheme == "-" else scheme)
            chosen = copy.deepcopy(original if network == "original" else accelerated)
            chosen = chosen.to("cuda", self.dtype).to(memory_format=torch.channels_last)
            return optimize_(chosen) if network == "fused" else chosen

    def make(self, name: str, seconds: float) -> None:
        """``name``: network, scheme and how it is run, such as "fused channel graph"."""
        network, scheme, way = name.split()
        try:
            with at_most(seconds), self.conditions():
                model = self.placed(network, scheme)
                model(self.x)  # measures which kernels are the fastest, and sets libraries up
                if way == "compiled":
                    # With TF32 off, Triton's convolutions are a fraction as fast as cuDNN's and take minutes to try.
                    tried = "ATEN,TRITON" if self.tf32 else "ATEN"
                    torch._inductor.config.max_autotune_conv_backends = tried
                    model = torch.compile(model, mode="max-autotune", dynamic=False)
                    for _ in range(3):
                        model(self.x)
                self.models.append(model)
                self.calls[name] = self.recorded(model) if way == "graph" else (lambda: model(self.x))
        except OutOfTime:
            self.problems[name] = f"not done in {seconds:.0f} s"
        except Exception as problem:
            self.problems[name] = f"{type(problem).__name__}: {problem}"[:300]

    def recorded(self, model: nn.Module) -> Callable[[], Any]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                model(self.x)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(self.x)
        return graph.replay

    @contextlib.contextmanager
    def conditions(self) -> Iterator[None]:
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=self.tf32):
            torch.backends.cuda.matmul.allow_tf32 = self.tf32
            yield

    def timed(self) -> dict[str, Any]:
        """Milliseconds, in turn: the median over rounds, and the smallest and largest."""
        rounds: dict[str, list[float]] = {name: [] for name in self.calls}
        with self.conditions():
            for _ in range(5):
                for name, call in self.calls.items():
                    rounds[name].append(1e3 * seconds_of(call, 0.1))
        times = {name: [statistics.median(r), min(r), max(r)] for name, r in rounds.items()}
        return {"milliseconds": times, "problems": self.problems}


SETTINGS: dict[str, tuple[torch.dtype, int, bool]] = {
    "bfloat16, batch 64": (torch.bfloat16, 64, True),
    "bfloat16, batch 1": (torch.bfloat16, 1, True),
    "float32 without TF32, batch 64": (torch.float32, 64, False),
}

QUICK = {
    "bfloat16, batch 64": ["original - eager", "accelerated channel eager", "fused channel eager",
                           "fused channel graph", "original - graph", "fused 3d eager"],
    "bfloat16, batch 1": ["original - graph", "accelerated channel graph", "fused channel graph", "fused 3d graph"],
    "float32 without TF32, batch 64": ["original - eager", "accelerated channel eager", "accelerated 3d eager",
                                       "fused channel eager"],
}  # fmt: skip
SLOW = [
    ("bfloat16, batch 64", "original - compiled"),
    ("float32 without TF32, batch 64", "original - compiled"),
    ("bfloat16, batch 64", "fused channel compiled"),
    ("bfloat16, batch 1", "original - compiled"),
    ("bfloat16, batch 64", "accelerated channel compiled"),
    ("float32 without TF32, batch 64", "accelerated channel compiled"),
]


def stacks(report: dict[str, Any], made: list[Setting], end: float, save: Callable[[], None]) -> None:
    for setting in made:
        for name in QUICK[setting.name]:
            setting.make(name, max(1.0, end - time.monotonic()))
        report.setdefault("stacks", {})[setting.name] = setting.timed()
        save()


def compiled(report: dict[str, Any], made: list[Setting], end: float, save: Callable[[], None]) -> None:
    by_name = {setting.name: setting for setting in made}
    for place, name in SLOW:
        if place not in by_name:
            continue
        left = end - time.monotonic()
        if left < 20:
            by_name[place].problems[name] = "no time was left"
            continue
        by_name[place].make(name, min(COMPILING, left))
        report.setdefault("stacks", {})[place] = by_name[place].timed()
        save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts",
        nargs="*",
        choices=list(SHARES),
        default=list(SHARES),
        help="none: write the tables of what is there again, which needs no GPU",
    )
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), help="of the stacks")
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--count", type=int, default=200, help="random layers a dtype")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--limits", action="store_true", help="print what an H200 could do at most, and end")
    given = parser.parse_args()
    if given.limits:
        print_limits()
        return
    if not given.parts:
        (given.out / "kernels.md").write_text(markdown(json.loads((given.out / "kernels.json").read_text())) + "\n")
        return
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.kernels.run needs an NVIDIA GPU; --limits prints what one could do.")
    start = time.monotonic()
    end = start + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    report: dict[str, Any] = {"machine": machine, "macs": {s: networks(s)[2] for s in ("channel", "3d")}, "seconds": {}}
    with contextlib.suppress(OSError, ValueError):
        earlier = json.loads((given.out / "kernels.json").read_text())
        if earlier["machine"] == machine:  # parts that are not run again stay
            report |= {part: earlier[part] for part in ("check", "sanitizer", "layers", "stacks") if part in earlier}
            report["seconds"] = earlier["seconds"]
    for part in given.parts:
        if part == "stacks":
            report[part] = {name: found for name, found in report.get(part, {}).items() if name not in given.settings}
        else:
            report.pop(part, None)

    def save() -> None:
        (given.out / "kernels.json").write_text(json.dumps(report, indent=1) + "\n")
        (given.out / "kernels.md").write_text(markdown(report) + "\n")

    made = [Setting(name, *SETTINGS[name]) for name in given.settings if {"stacks", "compiled"} & set(given.parts)]
    if {"layers", "stacks", "compiled"} & set(given.parts):
        with tempfile.TemporaryDirectory() as folder:
            shared_out("warm", 0, Path(folder), 0.2 * given.seconds)
        report["seconds"]["compiling"] = time.monotonic() - start
    for part in given.parts:
        began = time.monotonic()
        share = min(SHARES[part] * given.seconds, end - began - 5)
        actions: dict[str, Callable[[], None]] = {
            "check": lambda share=share: check(report, share, given.count),
            "sanitizer": lambda share=share: sanitizer(report, share),
            "layers": lambda share=share, began=began: layers(report, began + share, save),
            "stacks": lambda share=share, began=began: stacks(report, made, began + share, save),
            "compiled": lambda: compiled(report, made, end - 15, save),
        }
        try:
            actions[part]()
        except OutOfTime:
            report.setdefault("stopped", []).append(part)
        except Exception as problem:
            report.setdefault("problems", {})[part] = f"{type(problem).__name__}: {problem}"[:500]
        report["seconds"][part] = time.monotonic() - began
        with contextlib.suppress(OSError):
            report["choices"] = json.loads(cache_file().read_text())
        save()
        print(f"{part}: {report['seconds'][part]:.0f} s", flush=True)
    print(markdown(report))


if __name__ == "__main__":
    main()
