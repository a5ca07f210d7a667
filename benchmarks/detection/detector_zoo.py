"""Every detector and segmentation network of torchvision: is it exact, is the target met, is it saved?

    python -m benchmarks.detection.detector_zoo [--only PATTERN ...]

Random weights, statistics of batch norms as on these images, two sizes of images. Each network is accelerated at 1.5x
and checked: the achieved ratio is in its window; the saved and loaded copy answers bit for bit the same; and at full
rank (every site at its limits, linear solver) backbone features and head outputs before the choice of boxes are the
original's to 1e-3, on the images it was fitted to and on others of another size: in float32, or in float64 where a
hundred layers with random weights make more of float32's rounding. Writes
benchmarks/results/detector_zoo.json and .md; networks that are there already are kept.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import leanconv
from benchmarks.common.machine import machine
from benchmarks.common.results import RESULTS
from leanconv.network.sites import Site
from leanconv.network.survey import survey
from leanconv.network.torchvision_detectors import kind_of, seen_as_detector, seen_as_tensors, tensors_of

TARGET, EXACT, SAMPLES = 1.5, 1e-3, 256
SMALL = {"min_size": 96, "max_size": 128}  # for detectors that can be told
FIXED = ("ssd300", "ssdlite320")  # whose size is in the name
# Two batches: what is fitted to, and others.
SIZES = (((96, 128), (120, 100)), ((128, 96), (100, 100)))


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    arguments: dict[str, Any] = {"weights": None, "weights_backbone": None}
    if name in torchvision.models.list_models(torchvision.models.detection) and not name.startswith(FIXED):
        arguments |= SMALL
    return torchvision.models.get_model(name, **arguments).eval()


def pictures(model: nn.Module, number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.rand(3, *size, generator=generator).to(next(model.parameters())) for size in SIZES[number]]


def given(model: nn.Module, number: int) -> Any:
    """What the network takes: a list of images for a detector, a tensor for others."""
    images = pictures(model, number)
    return (
        images
        if kind_of(model)
        else torch.stack([image[:, :96, :96] if number else image[:, :90, :90] for image in images])
    )


def settle(model: nn.Module) -> nn.Module:
    """Statistics of batch norms, frozen ones too, as they are on these images: numbers neither vanish nor grow."""

    def measure(norm: Any, inputs: Any) -> None:
        x = inputs[0]
        if not len(x):  # behind boxes, and none was found
            return
        norm.running_mean.copy_(x.mean((0, 2, 3)))
        norm.running_var.copy_(x.var((0, 2, 3), unbiased=False) + 1e-3)

    handles = [
        module.register_forward_pre_hook(measure) for module in model.modules() if hasattr(module, "running_mean")
    ]
    with torch.no_grad():
        model(given(model, 0))
    for handle in handles:
        handle.remove()
    return model


def outputs(model: nn.Module, seen: Any) -> list[Tensor]:
    """Feature maps and head outputs, before boxes are chosen."""
    with torch.no_grad():
        if kind_of(model) is None:
            return list(model(seen).values())
        seen_as_tensors(model)
        try:
            return list(model(seen))
        finally:
            seen_as_detector(model)


def seen_of(model: nn.Module, number: int) -> Any:
    return tensors_of(model, pictures(model, number)) if kind_of(model) else given(model, number)


def at_full_rank(model: nn.Module, common: dict[str, Any]) -> tuple[tuple[Site, ...], int, list[float]]:
    """The sites, how many of them were replaced, and the largest relative error on images of either size."""
    sample = seen_of(model, 0)
    if kind_of(model):
        seen_as_tensors(model)
    sites = survey(model, sample).sites
    seen_as_detector(model)
    ranks: dict[str, Any] = {
        site.name: (site.geometry.spatial_limit, site.geometry.channel_limit)
        if site.geometry.splits_spatially
        else site.geometry.channel_limit
        for site in sites
    }
    full = leanconv.accelerate(model, [given(model, 0)], ranks=ranks, **common)
    errors = []
    for number in (0, 1):
        seen = seen_of(model, number)
        pairs = zip(outputs(full.model, seen), outputs(model, seen), strict=True)
        errors.append(max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs))
    return sites, len(full.layers), errors


def check(name: str) -> dict[str, Any]:
    started = time.perf_counter()
    model = settle(build(name))
    common: dict[str, Any] = {"progress": False, "samples": SAMPLES, "solver": "linear", "asymmetric": False}
    result = leanconv.accelerate(model, [given(model, 0)], TARGET, **common)
    assert TARGET <= result.speedup < 1.02 * TARGET, f"achieved {result.speedup}"
    with tempfile.TemporaryDirectory() as folder:
        again = leanconv.load(result.save(Path(folder) / "saved"), model=build(name))
    saved = all(
        torch.equal(a, b)
        for a, b in zip(outputs(again, seen_of(model, 1)), outputs(result.model, seen_of(model, 1)), strict=True)
    )

    sites, replaced, errors, dtype = *at_full_rank(model, common), "float32"
    if max(errors) >= EXACT:
        sites, replaced, errors, dtype = *at_full_rank(model.double(), common), "float64"
    return {
        "name": name,
        "sites": len(sites),
        "shared": sum(site.calls > 1 for site in sites),
        "replaced": replaced,
        "full_rank_dtype": dtype,
        "speedup": result.speedup,
        "full_rank_error": errors,
        "saved_equal": saved,
        "holds": saved and max(errors) < EXACT and replaced == len(sites),
        "seconds": time.perf_counter() - started,
    }


def markdown(data: dict[str, Any]) -> str:
    lines = [
        f"`python -m benchmarks.detection.detector_zoo` on {data['machine']}: "
        f"{sum(row['holds'] for row in data['rows'])} of {len(data['rows'])} networks pass every check.",
        "",
        "| network | sites | on several maps | for 1.5x | full rank: error | other size | in | saved | all hold |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']} | {row['sites']} | {row['shared']} | {row['speedup']:.3f} | "
        f"{row['full_rank_error'][0]:.1e} | {row['full_rank_error'][1]:.1e} | {row['full_rank_dtype']} | "
        f"{'equal' if row['saved_equal'] else 'DIFFERS'} | {'yes' if row['holds'] else 'NO'} |"
        for row in sorted(data["rows"], key=lambda row: row["name"])
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of names")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    file = options.out / "detector_zoo.json"
    data = json.loads(file.read_text()) if file.exists() else {"rows": []}
    data |= {"script": "benchmarks/detection/detector_zoo.py", "machine": machine("cpu")}
    known = {row["name"] for row in data["rows"]}
    families = (torchvision.models.detection, torchvision.models.segmentation)
    names = [name for family in families for name in torchvision.models.list_models(family)]
    for name in names:
        if name in known or not any(fnmatch.fnmatch(name, pattern) for pattern in options.only):
            continue
        row = check(name)
        data["rows"].append(row)
        file.write_text(json.dumps(data, indent=1) + "\n")
        file.with_suffix(".md").write_text(markdown(data))
        print(row, flush=True)


if __name__ == "__main__":
    main()
