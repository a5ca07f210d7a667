"""What a run costs beside its solves: passes of the network, memory, seconds a stage.

    python -m benchmarks.engine.run --device cpu --images 64
    python -m benchmarks.engine.run --device cuda --images 1000 --scaling 250 500 1000 2000
    python -m benchmarks.engine.run --device cpu --images 128 --networks vgg16 --budgets 8GB 4GB 2GB --name memory
    python -m benchmarks.engine.run --device cpu --images 64 --ranks sensitivity --name sensitivity   # their cost
    python -m benchmarks.engine.run --images 64 --limits      # the least any run needs, by arithmetic
    python -m benchmarks.engine.run --data DIR --networks resnet50 --images 300 --plain --name plain   # a user's call

A forward-pass equivalent is the wall time of accelerate() less its solves (spectra, what ranks by sensitivity measure,
ranks, factors) over one no-grad pass of the original on the same images and batches, before it in the same process. On
a CPU every network has a process of its own, and a pass is timed behind accelerate() too: how long one takes depends on
what memory the C library has at hand, and accelerate() leaves it more than a new process has. Weights and images are
random: time does not depend on them. With --data DIR (benchmarks/README.md)
ResNet-50 and EfficientNet-lite0 have trained weights, and images are those of calib.tar. --plain is accelerate(model,
images, speedup) as a user calls it, without other arguments. Writes benchmarks/results/engine-DEVICE[-NAME].json and
.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import leanconv
from benchmarks.common import imagenet_networks
from benchmarks.common.initialise import initialise
from benchmarks.common.machine import machine
from benchmarks.common.results import RESULTS, ROOT, write_results
from benchmarks.common.vgg16_probe import read_pictures
from leanconv.network.survey import survey

SAMPLES = 50_000  # accelerate's default
SPEEDUPS = {"vgg16": 4.0, "resnet50": 2.0, "efficientnet_lite0": 1.3}
SOLVES = ("statistics", "measuring layers", "looking at patches", "choosing ranks", "solving")
STAGES = ("preparing", "original network", "accelerated network", *SOLVES)


class Peak:
    """The most memory in use inside the block beyond what was before it, in bytes: of the device, or of the process."""

    def __init__(self, device: str):
        self._cuda = device.startswith("cuda")
        self._ended = threading.Event()
        self.bytes = 0

    def __enter__(self) -> Peak:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            self._before = resident()
            self._watch = threading.Thread(target=self._look, daemon=True)
            self._watch.start()
        return self

    def _look(self) -> None:
        while not self._ended.wait(0.005):
            self.bytes = max(self.bytes, resident() - self._before)

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            self.bytes = torch.cuda.max_memory_allocated() - self._before
        else:
            self._ended.set()
            self._watch.join()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def seconds(device: str, work: Any) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - started


def forward(model: nn.Module, batches: list[Tensor], device: str, times: int) -> float:
    def once() -> None:
        with torch.no_grad():
            for batch in batches:
                model(batch.to(device))

    return statistics.median(seconds(device, once) for _ in range(times))


def network(name: str, data: Path | None) -> nn.Module:
    if data is not None and name in imagenet_networks.NETWORKS:
        return imagenet_networks.load(name, data)
    if name == "efficientnet_lite0":  # not in torchvision
        return initialise(imagenet_networks.EfficientNetLite0()).eval()
    torch.manual_seed(0)
    model: nn.Module = torchvision.models.get_model(name, weights=None).eval()
    return model


def images_of(count: int, batch: int, data: Path | None = None) -> list[Tensor]:
    if data is not None:
        classes = json.loads((data / "classes.json").read_text())
        return list(torch.cat(read_pictures(data / "calib.tar", count, classes)[0]).split(batch))
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(count, 3, 224, 224, generator=generator).split(batch))


def measure(name: str, count: int, options: argparse.Namespace, memory: str | None = None) -> dict[str, Any]:
    """One network on so many images: the median of a few runs where a GPU makes them short."""
    device = options.device
    model = network(name, options.data).to(device)
    batches = images_of(count, options.batch, options.data)
    one_pass = forward(model, batches, device, 1 if memory else 3)
    rows = []
    for number in range(4 if device.startswith("cuda") else 1):
        result: list[leanconv.Accelerated] = []

        def run(result: list[leanconv.Accelerated] = result) -> None:
            arguments = {} if options.plain else {"ranks": options.ranks, "refine": "none", "memory": memory}
            result.append(leanconv.accelerate(model, batches, SPEEDUPS[name], progress=False, **arguments))

        with Peak(device) as peak:
            total = seconds(device, run)
        stages = result[0].seconds
        rest = total - sum(stages.get(stage, 0.0) for stage in SOLVES)
        rows.append((total, rest, stages, peak.bytes, number == 0))
    kept = [row for row in rows if not row[4]] or rows
    total, rest, stages, most, _ = sorted(kept, key=lambda row: row[1])[len(kept) // 2]
    return {
        "network": name,
        "speedup": SPEEDUPS[name],
        "images": count,
        "batch": options.batch,
        "memory": memory,
        "forward": one_pass,
        "behind": (behind := one_pass if memory else forward(model, batches, device, 3)),
        "total": total,
        "first": rows[0][0],
        "equivalents": rest / one_pass,
        "equivalents behind": rest / behind,
        "peak": most,
        "stages": stages,
        "answer": answer_of(result[0].model, device) if memory else None,
    }


def answer_of(model: nn.Module, device: str) -> list[float]:
    with torch.no_grad():
        answer: Tensor = model(images_of(8, 8)[0].to(device))
    return answer.flatten().tolist()


def apart(name: str, count: int, options: argparse.Namespace, memory: str | None = None) -> dict[str, Any]:
    """``measure`` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.engine.run", "--device", options.device, "--images", str(count)]
    command += ["--networks", name, "--batch", str(options.batch), "--ranks", options.ranks, "--one", memory or ""]
    command += ["--data", str(options.data)] if options.data else []
    command += ["--plain"] if options.plain else []
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if found.returncode:
        raise SystemExit(found.stderr)
    row: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return row


def budget_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every budget in a process of its own, whose memory nothing else has stretched. Answers are compared with those of
    the first."""
    rows = []
    for memory in options.budgets:
        rows.append(apart(options.networks[0], options.images, options, memory))
        print(f"budget {memory}: peak {rows[-1]['peak'] / 1e9:.2f} GB, total {rows[-1]['total']:.1f} s", flush=True)
    reference = torch.tensor(rows[0]["answer"])
    for row in rows:
        row["difference"] = float((torch.tensor(row.pop("answer")) - reference).norm() / reference.norm())
    return rows


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def rendered(data: dict[str, Any]) -> str:
    parts = [f"{data['machine']}; `{data['command']}`"]
    found = [row for key in ("networks", "scaling", "budgets") for row in data[key]]
    shown = [stage for stage in STAGES if any(stage in row["stages"] for row in found)]
    heads = ["network", "images", "forward, s", "accelerate(), s", "the first time", "equivalents"]
    heads += ["forward behind it, s", "equivalents of that", "peak, GB", *shown]
    for key in ("networks", "scaling", "budgets"):
        if not data[key]:
            continue
        rows = [
            [
                f"{row['network']} {row['speedup']:g}x",
                str(row["images"]),
                f"{row['forward']:.2f}",
                f"{row['total']:.2f}",
                f"{row['first']:.2f}",
                f"{row['equivalents']:.2f}",
                f"{row['behind']:.2f}",
                f"{row['equivalents behind']:.2f}",
                f"{row['peak'] / 1e9:.2f}",
                *(f"{row['stages'].get(stage, 0.0):.2f}" for stage in shown),
            ]
            for row in data[key]
        ]
        if key == "budgets":
            for row, budget in zip(rows, data[key], strict=True):
                row[:0] = [budget["memory"]]
                row.append(f"{budget['difference']:.1e}")
            parts.append(table(["memory=", *heads, "difference"], rows))
        else:
            parts.append(table(heads, rows))
    return "\n\n".join(parts) + "\n"


def command_line(options: argparse.Namespace) -> str:
    """What prints this again, wherever it is written to."""
    words = ["python", "-m", "benchmarks.engine.run", "--device", options.device]
    words += ["--images", str(options.images), "--batch", str(options.batch), "--networks", *options.networks]
    words += ["--ranks", options.ranks] if options.ranks != "energy" else []
    words += ["--data", "DIR"] if options.data else []
    words += ["--plain"] if options.plain else []
    for name in ("scaling", "budgets"):
        values = [str(value) for value in getattr(options, name)]
        words += [f"--{name}", *values] if values else []
    return " ".join([*words, *(["--name", options.name] if options.name else [])])


def least_passes(name: str, images: int) -> tuple[float, float]:
    """1 + 1 / speedup, and with the responses of the original's filters to the accelerated network's inputs, which a
    layer is fitted from: as many of its positions as are sampled."""
    found = survey(network(name, None), torch.rand(1, 3, 224, 224))
    sampled = -(-SAMPLES // images)
    fitted = sum(site.cost.dense * min(1.0, sampled / site.positions) for site in found.sites) / found.macs
    passes = 1 + 1 / SPEEDUPS[name]
    return passes, passes + fitted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--networks", nargs="+", default=list(SPEEDUPS), choices=list(SPEEDUPS))
    parser.add_argument("--ranks", choices=("energy", "sensitivity"), default="energy")
    parser.add_argument("--plain", action="store_true", help="accelerate() by its defaults: no --ranks, no --budgets")
    parser.add_argument("--data", type=Path, help="a folder with trained weights and pictures; default: random ones")
    parser.add_argument("--scaling", nargs="*", type=int, default=[])
    parser.add_argument("--budgets", nargs="*", default=[], help="memory= to try, each in its own process")
    parser.add_argument("--limits", action="store_true", help="print what no run can go under, and end")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="", help="added to the names of the result files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.plain and (options.budgets or options.ranks != "energy"):
        parser.error("--plain is a call without arguments; leave out --ranks and --budgets.")
    if options.limits:
        for name in options.networks:
            two, fitted = least_passes(name, options.images)
            print(f"{name}, {options.images} images: {two:.2f} passes of both networks, {fitted:.2f} with responses")
        return
    if options.one is not None:
        print(json.dumps(measure(options.networks[0], options.images, options, options.one or None)))
        return
    data: dict[str, Any] = {
        "machine": machine(options.device),
        "command": command_line(options),
        "networks": [],
        "scaling": [],
        "budgets": budget_rows(options) if options.budgets else [],
    }
    if not options.budgets:
        # A GPU's memory is torch's own, and a process takes seconds to begin there.
        one = measure if options.device.startswith("cuda") else apart
        for name in options.networks:
            data["networks"].append(one(name, options.images, options))
            row = data["networks"][-1]
            print(f"{name}: {row['total']:.1f} s, {row['equivalents']:.2f} forward-pass equivalents", flush=True)
        for name in options.networks if options.scaling else ():
            for count in options.scaling:
                data["scaling"].append(one(name, count, options))
                print(f"{name}, {count} images: {data['scaling'][-1]['total']:.2f} s", flush=True)
    text = rendered(data)
    stem = f"engine-{options.device.partition(':')[0]}" + (f"-{options.name}" if options.name else "")
    write_results(options.out, stem, data, text)


if __name__ == "__main__":
    main()
