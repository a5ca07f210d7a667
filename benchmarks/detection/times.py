"""Milliseconds a picture of Faster R-CNN with VGG-16: the accelerated backbones beside the original.

    python -m benchmarks.detection.times --weights vgg16_probe.safetensors --device cpu
    python -m benchmarks.detection.times --weights vgg16_probe.safetensors --device cuda

Both orders of the detection table: ranks by sensitivity on the classifier, which is then trained as a detector, and
ranks by energy on the detector's backbone. The time of a backbone depends on its ranks and not on its weights, so it is
fitted quickly, on a few pictures of calib.tar in the folder of the weights. Heads are not trained: they have as many
proposals as trained ones, and return as many boxes as is allowed, which trained ones seldom do. Nothing else may run on
the machine.
Writes benchmarks/results/detection_times-DEVICE.json and .md.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import leanconv
from benchmarks.common.machine import machine
from benchmarks.common.results import RESULTS, write_results
from benchmarks.detection.networks import MEAN, STD
from benchmarks.detection.training import build, original
from leanconv.images import Preprocess, find_pictures
from leanconv.images.loading import spread, stream
from leanconv.runtimes.bench.measure import interleaved, paired_ratio, timing, wait_for

CLASSES = 20  # of VOC
QUICK = {"solver": "linear", "refine": "none", "progress": False}  # neither has a say in the ranks


def pictures_of(place: Path, count: int, device: str) -> list[Tensor]:
    """Batches of 8, as a classifier is given them."""
    found = spread(find_pictures(place), count)
    return [batch.to(device) for batch, _ in stream(found, Preprocess(), batch=8)]


def as_given(batch: Tensor) -> list[Tensor]:
    """The pictures of a batch, from 0 to 1, as a detector is given them."""
    mean, std = (torch.tensor(values, device=batch.device).view(3, 1, 1) for values in (MEAN, STD))
    return list((batch * std + mean).clamp(0, 1))


def detectors(
    weights: Path, images: list[Tensor], speedups: list[float], options: argparse.Namespace
) -> Iterator[tuple[str, float, nn.Module]]:
    """The original (speed-up 1), then those accelerated in either order."""
    classifier = original(weights).to(options.device)
    torch.manual_seed(0)
    names = [str(number) for number in range(CLASSES)]
    plain = build(names, original(weights).features, size=options.size, width=options.width, frozen=0)
    plain = plain.to(options.device).eval()
    yield "original", 1.0, plain
    with tempfile.TemporaryDirectory() as folder:  # what is measured of the layers serves every speed-up
        for speedup in speedups:
            given: dict[str, Any] = {**QUICK, "samples": options.samples, "workdir": f"{folder}/classifier"}
            result = leanconv.accelerate(classifier, images, speedup, ranks="sensitivity", **given)
            first = copy.deepcopy(plain)
            built = build(names, result.model.features, size=options.size, width=options.width, frozen=0)
            first.backbone = built.backbone.to(options.device).eval()
            yield "accelerated, then trained", speedup, first
            given["workdir"] = f"{folder}/detector"
            lists = [as_given(batch) for batch in images]
            yield (
                "trained, then accelerated",
                speedup,
                leanconv.accelerate(plain, lists, speedup, part="backbone", **given).model,
            )


@torch.no_grad()
def row(title: str, speedup: float, networks: dict[str, nn.Module], batch: Tensor, options: Any) -> dict[str, Any]:
    """The detector beside the original, whole and the backbone alone."""
    images = as_given(batch)
    canvases = torch.rand(len(images), 3, options.size, options.size, device=options.device)
    calls: dict[str, Callable[[], object]] = {}
    for name, network in networks.items():
        calls[name] = lambda network=network: network(images)
        calls[f"{name}, backbone"] = lambda network=network: network.backbone(canvases)
    found = interleaved(calls, seconds=options.seconds, finish=wait_for(torch.device(options.device))).times
    return {
        "title": title,
        "speedup": speedup,
        "rounds": len(found["original"]),
        "ms": {name: 1000 * timing(values).median / len(images) for name, values in found.items()},
        "faster": vars(paired_ratio(found["original"], found["this"])),
        "backbone faster": vars(paired_ratio(found["original, backbone"], found["this, backbone"])),
    }


def markdown(data: dict[str, Any]) -> str:
    rounds = [one["rounds"] for one in data["rows"]]
    lines = [
        f"`{data['command']}` on {data['machine']}: Faster R-CNN with VGG-16, pictures of {data['size']} pixels, "
        f"{data['each']} a call, float32, torch as it is; each beside the original, in turns, for {data['seconds']:g} "
        f"seconds ({min(rounds)} to {max(rounds)} rounds); medians, ratios with their 95 % interval.",
        "",
        "| detector | MACs, asked for | ms a picture (original) | times faster | backbone, ms (original) | faster |",
        "|---|---|---|---|---|---|",
    ]
    for one in data["rows"]:
        ms = one["ms"]
        lines.append(
            f"| {one['title']}, {one['speedup']:g}x | {one['speedup']:g}x fewer | {ms['this']:.2f} "
            f"({ms['original']:.2f}) | {_ratio(one['faster'])} | {ms['this, backbone']:.2f} "
            f"({ms['original, backbone']:.2f}) | {_ratio(one['backbone faster'])} |"
        )
    return "\n".join(lines) + "\n"


def _ratio(found: dict[str, float]) -> str:
    return "{value:.2f} ({low:.2f} to {high:.2f})".format(**found)


def command(options: argparse.Namespace) -> str:
    """What prints this again, wherever the weights are."""
    words = ["python", "benchmarks/detection/times.py", "--device", options.device.partition(":")[0]]
    for name in ("pictures", "samples", "seconds", "size", "width"):
        words += [f"--{name}", str(getattr(options, name)).removesuffix(".0")]
    return " ".join([*words, "--speedups", *(f"{speedup:g}" for speedup in options.speedups)])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, help="pictures; calib.tar by the weights")
    parser.add_argument("--pictures", type=int, default=64, help="how many of them")
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--speedups", type=float, nargs="+", default=[2.0, 3.0, 4.0, 5.0])
    parser.add_argument("--size", type=int, default=320, help="side of the canvases, pixels")
    parser.add_argument("--width", type=int, default=1024, help="of fc6 and fc7")
    parser.add_argument("--seconds", type=float, default=10.0, help="of measuring, each detector beside the original")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    place = options.calibration or options.weights.parent / "calib.tar"
    images = pictures_of(place, options.pictures, options.device)
    found = detectors(options.weights, images, options.speedups, options)
    _, _, plain = next(found)
    rows = []
    for title, speedup, network in found:
        rows.append(row(title, speedup, {"original": plain, "this": network}, images[0], options))
        print(f"{title}, {speedup:g}x: {_ratio(rows[-1]['faster'])} times faster", flush=True)
    kind = options.device.partition(":")[0]
    data = {
        "command": command(options),
        "machine": machine(options.device),
        "size": options.size,
        "each": len(images[0]),
        "seconds": options.seconds,
        "pictures": options.pictures,
        "samples": options.samples,
        "rows": rows,
    }
    write_results(options.out, f"detection_times-{kind}", data, markdown(data))


if __name__ == "__main__":
    main()
