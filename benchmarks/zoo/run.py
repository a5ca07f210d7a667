"""Every network of torchvision and every family of timm: does it run, is it exact, is it saved, does it export?

    python -m benchmarks.zoo.run [--only PATTERN] [--jobs 2]

All classification networks of torchvision and one of every timm family, with random weights and a few small images.
Each is accelerated at 1.5x (or nearly the most it allows) and checked: the output has the original's shape; the ratio
is between the one asked for and 2 % more; at full rank the output is the original's to 1e-4; the saved and loaded copy
has the same output bit for bit; torch.export takes it. Networks whose MACs are mostly in Linear layers count those too.

Writes benchmarks/results/zoo.json and .md. Finished rows are written to benchmarks/.zoo.jsonl, so that a run
that was stopped continues, as long as the code is the same; --fresh starts again.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import json
import math
import multiprocessing
import os
import platform
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import timm
import torch
import torchvision
from torch import Tensor, nn

import leanconv
from benchmarks.common.results import RESULTS, write_results
from benchmarks.zoo.models import Entry, entries
from leanconv.calibrate.batches import take
from leanconv.config import Options
from leanconv.network import reasons
from leanconv.pipeline.prepare import Prepared, prepare

TARGET = 1.5
IMAGES = 2
SETTLING = 8  # images for the statistics of batch norms: with fewer, variances near zero make networks chaotic
SAMPLES = 256  # responses a layer; these are checks of the machinery, not of accuracy
EXACT = 1e-4
EIGEN_WORK = 4e9  # sum of d^3: about two seconds for one decomposition of each layer on one core
AT_LEAST = 5  # layers that are never left out
LARGE = 25e6  # parameters; larger networks are solved the short way, to save time


@dataclass
class Row:
    """What one network did. ``error`` is empty when every check held."""

    key: str
    family: str
    layers: str = ""
    solver: str = ""
    code: str = ""  # a digest of the source this was found with
    sites: int = 0
    large: int = 0  # of these, left out to save time
    reachable: float = 1.0
    target: float | None = None
    speedup: float | None = None
    full_rank_error: float | None = None
    full_rank_dtype: str = ""
    saved_equal: bool | None = None
    exports: bool | None = None
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> layers
    seconds: float = 0.0
    error: str = ""


def settle(model: nn.Module, images: Tensor) -> nn.Module:
    """Random weights that behave like trained ones.

    Builders start with zero biases, residual branches scaled to nothing and batch norms that have seen no image;
    then answers hardly depend on the input, and folding a norm or a bias wrong would not show.
    """
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)
    for module in model.modules():
        if isinstance(module, norms) and isinstance(module.weight, nn.Parameter):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    momenta = {m: m.momentum for m in model.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))}
    for module in momenta:
        module.momentum = 1.0
    for parameter in model.parameters():
        if float(parameter.detach().abs().max()) < 1e-3:
            nn.init.normal_(parameter, 0.0, 0.02)
    with torch.no_grad():
        model.train()(images)
    for module, momentum in momenta.items():
        module.momentum = momentum
    return model.eval()


def in_double(model: nn.Module, images: Tensor, fresh: Tensor) -> tuple[nn.Module, Tensor, Tensor]:
    """All in float64, or as they are if the network makes float32 numbers of its own on the way."""
    try:
        output(model.double(), fresh.double())
    except RuntimeError:
        return model.float(), images, fresh
    return model, images.double(), fresh.double()


def output(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        answer = model(images)
    assert isinstance(answer, Tensor)
    return answer


def prepared(model: nn.Module, images: Tensor, layers: Literal["conv", "all"], skip: list[str] | None) -> Prepared:
    options = Options.check(skip=skip, layers=layers)
    return prepare(model, take([images]).sample(), options, torch.device("cpu"))


def too_large(network: Prepared) -> list[str]:
    """The largest layers of a network whose eigenproblems, O(d^3) each, together would take too long.

    They are left out for the sake of the clock; a library that handles a layer handles the next of its kind.
    """
    work = {name: s.geometry.groups * s.geometry.channel_limit**3 for name, s in network.sites.items()}
    left_out: list[str] = []
    for name in sorted(work, key=lambda name: work[name], reverse=True):
        if sum(work.values()) <= EIGEN_WORK or len(work) <= AT_LEAST:
            break
        left_out.append(name)
        del work[name]
    return left_out


def full_ranks(network: Prepared) -> dict[str, Any]:
    """Nothing left out: d' and d'' at their limits."""
    ranks: dict[str, Any] = {}
    for name, site in network.sites.items():
        g = site.geometry
        ranks[name] = (g.spatial_limit, g.channel_limit) if g.splits_spatially else g.channel_limit
    return ranks


def check(entry: Entry) -> Row:
    """All checks of one network; a failure is put into the row, never raised."""
    row = Row(entry.key, entry.family, code=digest())
    started = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _check(entry, row)
    except Exception as error:
        row.error = f"{type(error).__name__}: {error}"[:300] + f" ({_where(error)})"
    row.seconds = time.perf_counter() - started
    return row


def _where(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def _check(entry: Entry, row: Row) -> None:
    torch.manual_seed(0)
    images, fresh = (torch.randn(IMAGES, 3, entry.size, entry.size) for _ in range(2))
    model = settle(entry.build(), torch.randn(SETTLING, 3, entry.size, entry.size))
    wanted = output(model, fresh)
    # Where Linear layers do most of the work they count, or there would be little to accelerate.
    everything = prepared(model, images, "all", None)
    linear = sum(layer.macs for layer in everything.survey.layers if layer.type == "Linear")
    layers: Literal["conv", "all"] = "all" if linear > everything.survey.macs / 2 else "conv"
    found = everything if layers == "all" else prepared(model, images, layers, None)
    row.layers, row.sites = layers, len(found.sites)
    if large := too_large(found):
        first = next(layer.name for layer in found.survey.layers if layer.type != "Linear")
        found = prepared(model, images, layers, [first, *large])
    row.large, row.reachable = len(large), found.reachable()

    common: dict[str, Any] = {"layers": layers, "samples": SAMPLES, "refine": "none", "progress": False}
    row.target = TARGET if row.reachable >= TARGET else math.floor(99 * row.reachable) / 100
    skip = [name for name, reason in found.skipped.items() if reason in (reasons.ASKED, reasons.FIRST)]
    del everything, found  # each holds two copies of the network: the largest would not fit into 24 GiB otherwise
    short = sum(p.numel() for p in model.parameters()) > LARGE
    row.solver = "linear, symmetric" if short else "nonlinear, asymmetric"
    way = {"solver": "linear", "asymmetric": False} if short else {}
    result = leanconv.accelerate(model, images, row.target, skip=skip, **way, **common)
    row.speedup = result.speedup
    row.skipped = dict(Counter(result.skipped.values()))
    answer = output(result.model, fresh)
    assert answer.shape == wanted.shape, f"output {tuple(answer.shape)}, was {tuple(wanted.shape)}"
    assert bool(torch.isfinite(answer).all()), "the answer is not finite"
    assert row.target <= row.speedup < 1.02 * row.target, f"achieved {row.speedup}, asked for {row.target}"
    assert torch.equal(wanted, output(model, fresh)), "the model was modified"

    with tempfile.TemporaryDirectory() as folder:
        result.save(Path(folder) / "saved")
        again = leanconv.load(Path(folder) / "saved", model=entry.build())
    row.saved_equal = torch.equal(output(again, fresh), answer)
    assert row.saved_equal, "the loaded copy answers otherwise"
    del again

    try:
        exported = torch.export.export(result.model, (fresh,)).module()
    except Exception:
        # Some networks torch.export does not take as they are; then the accelerated one need not do better.
        with contextlib.suppress(Exception):
            torch.export.export(model, (fresh,))
            row.exports = False
        assert row.exports is None, "the original exports, the accelerated network does not"
    else:
        difference = float((exported(fresh) - answer).norm() / answer.norm())
        row.exports = difference <= EXACT
        assert row.exports, f"the exported network is {difference:.1e} off"
    del result

    # In float64: a deep network with random weights multiplies rounding a thousand times on its way to the answer
    # (ResNet-152 in float32 is 5e-4 away from itself in float64), which would hide what is looked for.
    exact, images, fresh = in_double(model, images, fresh)
    row.full_rank_dtype = str(fresh.dtype).removeprefix("torch.")
    wanted = output(exact, fresh)
    ranks = full_ranks(prepared(exact, images, layers, large))
    whole = leanconv.accelerate(exact, images, ranks=ranks, solver="linear", asymmetric=False, skip=[], **common)
    assert len(whole.layers) == len(ranks)
    row.full_rank_error = float((output(whole.model, fresh) - wanted).norm() / wanted.norm())
    assert row.full_rank_error <= EXACT, f"full rank is {row.full_rank_error:.1e} off"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="shell pattern of names, for example 'resnet*'")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--fresh", action="store_true", help="forget the rows of a run that was stopped")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    kept = RESULTS.with_name(".zoo.jsonl")
    if options.fresh:
        kept.unlink(missing_ok=True)
    found = [Row(**json.loads(line)) for line in kept.read_text().splitlines()] if kept.exists() else []
    rows = {row.key: row for row in found if not row.error and row.code == digest()}
    wanted = [entry for entry in entries() if fnmatch.fnmatch(entry.key, options.only)]
    waiting = [entry for entry in wanted if entry.key not in rows]
    # A process a network: what one leaves behind cannot fail the next, and its memory is given back.
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs, initializer=torch.set_num_threads, initargs=(1,), maxtasksperchild=1) as pool:
        for number, row in enumerate(pool.imap_unordered(check, waiting), 1):
            rows[row.key] = row
            with kept.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
            state = row.error or f"{row.speedup:.2f}x of {row.reachable:.2f}x, exact to {row.full_rank_error:.0e}"
            print(f"{number}/{len(waiting)} {row.key}: {state} ({row.seconds:.0f} s)", flush=True)
    found = [rows[entry.key] for entry in wanted]
    if options.only == "*":
        write(found, options.out)
    print(summary(found))


def digest() -> str:
    """Of every line that has a part in a row: one found with other code is found again."""
    files = sorted([*Path(leanconv.__file__).parent.rglob("*.py"), *Path(__file__).parent.glob("*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def summary(rows: list[Row]) -> str:
    failed = [row.key for row in rows if row.error]
    worst = max((row.full_rank_error for row in rows if row.full_rank_error is not None), default=math.nan)
    return (
        f"{len(rows) - len(failed)} of {len(rows)} networks pass every check; the largest error at full rank is "
        f"{worst:.1e}." + (f" Failed: {', '.join(failed)}." if failed else "")
    )


def write(rows: list[Row], folder: Path) -> None:
    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__, "timm": timm.__version__}
    seconds = sum(row.seconds for row in rows)
    data = {
        "script": "benchmarks/zoo/run.py",
        "machine": f"{platform.machine()} CPU, one thread a network",
        "leanconv": leanconv.__version__,
        **versions,
        "process_seconds": seconds,
        "rows": [asdict(row) for row in rows],
    }
    lines = [
        f"`benchmarks/zoo/run.py` on {data['machine']}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f"; {seconds / 60:.0f} process minutes. Random weights. {summary(rows)}",
        "",
        "*Layers*: conv counts convolutions, all counts Linear layers too. *Left out*: the largest layers, to save "
        "time. *Reachable*: every rank at 1. *Solver*: the short way in networks of over "
        f"{LARGE / 1e6:.0f} million parameters, to save time. *Exact*: relative error of the answer at full rank "
        "(linear, symmetric), in float64 but for networks that only run in float32. "
        "*Left alone* at the achieved speed-up: layers and the reason.",
        "",
        "| network | layers | sites | reachable | solver | achieved | exact | saved = loaded | exports | left alone |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sites = f"{row.sites} ({row.large} left out)" if row.large else str(row.sites)
        left = "; ".join(
            f"{count} {reason.partition(':')[0].partition(' (')[0]}" for reason, count in row.skipped.items()
        )
        achieved = "-" if row.speedup is None else f"{row.speedup:.3f}x"
        exact = "-" if row.full_rank_error is None else f"{row.full_rank_error:.0e}"
        lines.append(
            f"| {row.key} | {row.layers} | {sites} | {row.reachable:.2f}x | {row.solver} | {achieved} | {exact} | "
            f"{_yes(row.saved_equal)} | {_yes(row.exports)} | {row.error or left} |"
        )
    write_results(folder, "zoo", data, "\n".join(lines))


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "nor the original"}[value]


if __name__ == "__main__":
    main()
