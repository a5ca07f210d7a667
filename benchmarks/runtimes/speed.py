"""Actual speed of VGG-16: the original, 4x fewer multiply-accumulates, and 4x less time, where each runs fastest.

    taskset -c 1 python -m benchmarks.runtimes.speed --data DIR
    taskset -c 1 python -m benchmarks.runtimes.speed --data DIR --calibration 250 --evaluation 250 --name speed-small

DIR: see benchmarks/README.md. Calibration and every
choice use calib.tar only, accuracy is from val.tar. All networks and runtimes are timed in turns, one image a call on
one thread. Writes benchmarks/results/speed-cpu.json and .md. A GPU's tables are those of benchmarks/kernels/run.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import leanconv
from benchmarks.common.results import RESULTS, write_results
from benchmarks.common.vgg16_probe import read_pictures, vgg16_probe
from leanconv.evaluation.classification import accuracy, agreement, logits_of
from leanconv.runtimes.bench.machine import machine
from leanconv.runtimes.bench.measure import interleaved, paired_ratio, timing
from leanconv.runtimes.runners import RUNTIMES, Conditions

ORIGINAL, BY_MACS, BY_TIME = "original", "3d, MACs", "latency"


def cpu(options: argparse.Namespace) -> dict[str, Any]:
    """One thread, one image a call."""
    torch.set_num_threads(1)
    classes = json.loads((options.data / "classes.json").read_text())
    calibration, _ = read_pictures(options.data / "calib.tar", options.calibration, classes)
    model = vgg16_probe(options.data / "vgg16_probe.safetensors")
    target = leanconv.Target(runtime=options.target, device="cpu")
    results, seconds = {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        work = options.workdir or scratch  # what is measured of the original serves both
        for name, arguments in ((BY_MACS, {}), (BY_TIME, {"ranks": leanconv.Latency(target=target)})):
            started = time.perf_counter()
            results[name] = leanconv.accelerate(
                model, calibration, options.speedup, samples=options.samples, refine="none", workdir=work, **arguments
            )
            seconds[name] = time.perf_counter() - started
            print(results[name], flush=True)
    networks = {ORIGINAL: model} | {name: result.model for name, result in results.items()}
    pictures, labels = read_pictures(options.data / "val.tar", options.evaluation, classes)
    times = timed(networks, calibration[0][:1], options.seconds)
    scores = scored(networks, pictures, labels)
    timing_of = results[BY_TIME].timing
    return {
        "script": "benchmarks/runtimes/speed.py",
        "part": "cpu",
        "machine": machine(torch.device("cpu"), 1),
        "leanconv": leanconv.__version__,
        "images": {"calibration": sum(map(len, calibration)), "evaluation": len(labels)},
        "samples": options.samples,
        "asked": options.speedup,
        "target": target.to_json(),
        "networks": {
            name: {
                **scores[name],
                "macs_ratio": results[name].speedup if name in results else 1.0,
                "times": times["times"][name],
                "best": times["best"][name],
                "time_ratio": times["ratios"][name],
                "seconds": seconds.get(name),
            }
            for name in networks
        },
        "measured_by_accelerate": None if timing_of is None else timing_of.to_json(),
        "layers": {
            name: {layer.name: [layer.scheme, *layer.ranks] for layer in result.layers}
            for name, result in results.items()
        },
        "stages": {name: result.seconds for name, result in results.items()},
    }


def timed(networks: dict[str, nn.Module], image: Tensor, seconds: float) -> dict[str, Any]:
    """Every network in every runtime, in turns; a network counts where it is fastest."""
    conditions = Conditions(device=torch.device("cpu"), threads=1)
    runtimes = ("onnxruntime", "openvino")
    pairs = [(name, runtime) for name in networks for runtime in runtimes]
    calls: dict[str, Callable[[], Any]] = {
        f"{name}/{runtime}": RUNTIMES[runtime].prepare(networks[name], image, conditions) for name, runtime in pairs
    }
    rounds = interleaved(calls, seconds=seconds).times
    found = {name: {runtime: timing(rounds[f"{name}/{runtime}"]) for runtime in runtimes} for name in networks}
    best = {name: min(runtimes, key=lambda runtime: times[runtime].median) for name, times in found.items()}
    base = rounds[f"{ORIGINAL}/{best[ORIGINAL]}"]
    return {
        "times": {name: {runtime: one.to_json() for runtime, one in times.items()} for name, times in found.items()},
        "best": best,
        "ratios": {name: vars(paired_ratio(base, rounds[f"{name}/{best[name]}"])) for name in networks},
    }


def scored(networks: dict[str, nn.Module], pictures: list[Tensor], labels: Tensor) -> dict[str, dict[str, float]]:
    logits = {name: logits_of(network, pictures, "cpu") for name, network in networks.items()}
    found = {name: accuracy(value, labels) for name, value in logits.items()}
    return {
        name: {
            "top1": one.top1,
            "top5": one.top5,
            "top5_change": one.top5 - found[ORIGINAL].top5,
            "agreement": agreement(logits[name], logits[ORIGINAL]),
        }
        for name, one in found.items()
    }


def markdown(results: dict[str, Any]) -> str:
    about, images = results["machine"], results["images"]
    lines = [
        f"`{results['script']}` on {about['cpu']}, one thread, torch {about['torch']}, onnxruntime "
        f"{about['onnxruntime']}, OpenVINO {about['openvino']}: VGG-16 with a linear head, 224 px, one image a call; "
        f"{images['calibration']} calibration and {images['evaluation']} evaluation images. `{BY_TIME}` was asked for "
        f"{results['asked']:g}x less time in {results['target']['runtime']}, `{BY_MACS}` for {results['asked']:g}x "
        "fewer MACs. Times are medians in turns; the ratio is against the original, each where it is fastest (bold).",
        "",
        "| network | MACs | onnxruntime, ms | OpenVINO, ms | times faster (95 % interval) | top-5 | change |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in results["networks"].items():
        cells = []
        for runtime, times in one["times"].items():
            mark = "**" if one["best"] == runtime else ""
            cells.append(f"{mark}{times['median_ms']:.1f}{mark}")
        ratio = one["time_ratio"]
        lines.append(
            f"| {name} | {one['macs_ratio']:.2f}x | {' | '.join(cells)} | {ratio['value']:.2f}x "
            f"({ratio['low']:.2f} to {ratio['high']:.2f}) | {100 * one['top5']:.1f} | {100 * one['top5_change']:+.1f} |"
        )
    return "\n".join(lines) + "\n"


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"cpu": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=list(PARTS), default="cpu")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--speedup", type=float, default=4.0)
    parser.add_argument("--target", choices=["onnxruntime", "openvino"], default="onnxruntime")
    parser.add_argument("--calibration", type=int, default=1000, help="images of calib.tar")
    parser.add_argument("--evaluation", type=int, default=1000, help="images of val.tar")
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=60.0, help="to measure all networks and runtimes in turns")
    parser.add_argument("--workdir", type=Path, help="keep the state of the runs here: started again, they go on")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", help="stem of the files written; default: speed-PART")
    options = parser.parse_args()
    results = PARTS[options.part](options)
    stem = options.name or f"speed-{options.part}"
    write_results(options.out, stem, results, markdown(results))


if __name__ == "__main__":
    main()
