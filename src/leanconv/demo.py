"""The whole method on a small network: nine convolutions that read digits, trained in seconds on two cores."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from leanconv.api import accelerate
from leanconv.errors import LeanconvError
from leanconv.evaluation.classification import accuracy, logits_of
from leanconv.evaluation.paired import compare
from leanconv.progress import reporter
from leanconv.report import check_page, write_report
from leanconv.result import Accelerated
from leanconv.runtimes.bench.comparison import bench
from leanconv.runtimes.bench.measure import interleaved
from leanconv.storage.folder import check_new, load
from leanconv.storage.records import write_record
from leanconv.system.text_table import table

# The six methods of the paper's comparison, as arguments of ``accelerate``; each adds one idea to those before it.
PAPER = {"refine": "none"}  # its own fit, not leanconv's default
METHODS: dict[str, dict[str, Any]] = {
    "Jaderberg": PAPER | {"scheme": "spatial", "ranks": "uniform"},
    "linear, symmetric": PAPER | {"scheme": "channel", "ranks": "uniform", "solver": "linear", "asymmetric": False},
    "nonlinear, symmetric": PAPER | {"scheme": "channel", "ranks": "uniform", "asymmetric": False},
    "nonlinear, asymmetric": PAPER | {"scheme": "channel", "ranks": "uniform"},
    "+ rank selection": PAPER | {"scheme": "channel", "ranks": "energy"},
    "3d": PAPER | {"scheme": "3d", "ranks": "energy"},
}
DEFAULT = "leanconv's default"
WAYS: dict[str, dict[str, Any]] = {**METHODS, DEFAULT: {}}
SPEEDUPS = (2.0, 3.0, 4.0, 6.0)
SAVED = 4.0
BATCH = 32
TRAINING = 1000
CALIBRATION = 500
SAMPLES = 5000


class DigitsNet(nn.Sequential):
    """VGG in small: nine 3 x 3 convolutions in four stages, batch norm and ReLU, 32 x 32 grey input."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        channels = 1
        for stage in ((24, 24), (48, 48), (96, 96, 96), (96, 96)):
            for width in stage:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        super().__init__(*layers, nn.Flatten(), nn.Linear(4 * channels, 10))


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1,797 digits, 8 x 8 upscaled to 32 x 32, shuffled, values 0 to 1."""
    data = load_digits()
    pictures = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    pictures = F.interpolate(pictures, size=32, mode="bilinear", align_corners=False)
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(0))
    return pictures[order], torch.tensor(data.target)[order]


def train(pictures: Tensor, labels: Tensor, *, epochs: int, step: Callable[[], None] = lambda: None) -> DigitsNet:
    """A trained network, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DigitsNet()
        teach(model, pictures, labels, epochs=epochs, step=step)
    return model


def teach(
    model: nn.Module, pictures: Tensor, labels: Tensor, *, epochs: int, step: Callable[[], None] = lambda: None
) -> None:
    """A plain training loop, in place; the network ends in eval mode."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    batches = -(-len(pictures) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=epochs * batches)
    for _ in range(epochs):
        for chosen in torch.randperm(len(pictures)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(pictures[chosen]), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
            step()
    model.eval()


def milliseconds(models: dict[str, nn.Module], batch: Tensor, seconds: float = 3.0) -> dict[str, float]:
    """Median time of one batch for each network, measured in turns."""
    with torch.no_grad():
        rounds = interleaved({name: partial(model, batch) for name, model in models.items()}, seconds=seconds)
    return {name: 1000 * statistics.median(times) for name, times in rounds.times.items()}


@dataclass(frozen=True)
class Demo:
    """Accuracies by method and speed-up; ``times`` are milliseconds of a batch of 32."""

    original: float
    images: int
    accuracies: dict[str, dict[float, float]]
    times: dict[str, float]
    threads: int
    saved: str
    example: Accelerated

    def to_json(self) -> dict[str, Any]:
        rows = self.accuracies.items()
        return {
            "original": self.original,
            "images": self.images,
            "accuracies": {name: {f"{speedup:g}x": value for speedup, value in row.items()} for name, row in rows},
            "milliseconds": self.times,
            "threads": self.threads,
            "saved": self.saved,
            "example": self.example.to_json(),
        }

    def __str__(self) -> str:
        heads = ["accuracy in %, no retraining", *(f"{speedup:g}x" for speedup in SPEEDUPS)]
        rows = [[name, *(f"{100 * row[speedup]:.1f}" for speedup in SPEEDUPS)] for name, row in self.accuracies.items()]
        base = self.times["original"]
        times = [[name, f"{value:.1f}", f"{base / value:.2f}x"] for name, value in self.times.items()]
        parts = [
            f"{SAVED:g}x, as a plain call gives it, layer by layer:\n{self.example}",
            f"original network: {100 * self.original:.1f} % of {self.images} digits it has not seen\n"
            + table(heads, rows),
            table([f"ms a batch of {BATCH}, {self.threads} threads", "ms", "faster"], times),
            self.saved,
        ]
        return "\n\n".join(parts)


def run_demo(
    *,
    out: Path | None = None,
    report: Path | None = None,
    epochs: int = 6,
    threads: int | None = None,
    quiet: bool = False,
) -> Demo:
    """Train, accelerate in seven ways at four speed-ups, time, save, load and check; ``report``: write the page too.
    ``threads``: as for ``accelerate``."""
    if out is not None:
        check_new(out)
    if report is not None:
        check_page(report, "report")
    progress = reporter(not quiet)
    pictures, labels = digits()
    test, test_labels = pictures[TRAINING:], labels[TRAINING:]
    with progress.stage("training", epochs * -(-TRAINING // BATCH)) as stage:
        model = train(pictures[:TRAINING], labels[:TRAINING], epochs=epochs, step=stage.advance)

    original = logits_of(model, test.split(100), "cpu")
    accuracies: dict[str, dict[float, float]] = {}
    networks: dict[str, nn.Module] = {"original": model}
    results: dict[float, Accelerated] = {}
    with progress.stage("accelerating", len(WAYS) * len(SPEEDUPS)) as stage:
        for name, arguments in WAYS.items():
            accuracies[name] = {}
            for speedup in SPEEDUPS:
                images = pictures[:CALIBRATION]
                arguments = {**arguments, "samples": SAMPLES, "threads": threads, "progress": False}
                result = accelerate(model, images, speedup, **arguments)
                logits = logits_of(result.model, test.split(100), "cpu")
                accuracies[name][speedup] = accuracy(logits, test_labels).top1
                if name == DEFAULT:
                    networks[f"default {speedup:g}x"] = result.model
                    results[speedup] = result
                elif name == "+ rank selection":
                    networks[f"channel {speedup:g}x"] = result.model
                stage.advance()
    example = results[SAVED]
    with tempfile.TemporaryDirectory() as scratch, progress.stage("saving and timing", 0):
        folder = example.save(out or Path(scratch) / "digits-4x")
        saved = [_checked(example, folder, "a temporary folder" if out is None else str(out), test[:BATCH])]
        name = f"default {SAVED:g}x"
        logits = logits_of(example.model, test.split(100), "cpu")
        lost = compare(original, logits, test_labels, original="original", other=name)
        about = {"data": "digits the network has not seen", "views": 1, "unreadable": []}
        write_record(folder, "evaluation", {**lost.to_json(), **about})
        pair = {"original": model, name: example.model}
        times = bench(pair, shape=(1, 32, 32), batches=[BATCH], seconds=0.5, layers=True, progress=False)
        write_record(folder, "bench", times.to_json())
        if report is not None:
            saved.append(f"the page: {write_report(folder, report)}")
        all_times = milliseconds(networks, test[:BATCH])
    return Demo(
        original=accuracy(original, test_labels).top1,
        images=len(test),
        accuracies=accuracies,
        times=all_times,
        threads=torch.get_num_threads(),
        saved="\n".join(saved),
        example=example,
    )


def _checked(result: Accelerated, folder: Path, where: str, batch: Tensor) -> str:
    """A sentence about ``folder``, after a check that the saved network answers like the one in memory."""
    with torch.no_grad():
        if not torch.equal(load(folder, model=DigitsNet())(batch), result.model(batch)):
            raise LeanconvError("the saved network answers differently from the one in memory; please report this.")
    size = sum(path.stat().st_size for path in folder.iterdir())
    return f"saved the {SAVED:g}x network to {where} ({size / 1e6:.1f} MB), loaded it back: answers are bit-equal"
