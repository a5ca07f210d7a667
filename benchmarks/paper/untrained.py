"""The paper's experiments: for every figure and table of it, our numbers, and whether its claim shows in them.

Those that need no training; trained.py has the others.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import leanconv
from benchmarks.common.subjects import Subject
from benchmarks.paper.table import HEADS, Table, claim, figures
from benchmarks.peers.spatial_sgd import train_spatial_pairs

CHANNEL = {"scheme": "channel", "ranks": "uniform"}
FILTERS, DATA = "spatial (filters)", "spatial-sgd (data)"  # Jaderberg's two ways
LINEAR = {"solver": "linear", "asymmetric": False}


def energy(subject: Subject) -> Table:
    """PCA energy: the share of the responses' variance in the first d' components, layer by layer."""
    with tempfile.TemporaryDirectory() as folder:
        leanconv.accelerate(
            subject.model, subject.calibration, 2.0, skip=[], progress=False, workdir=folder, **CHANNEL, **LINEAR
        )
        spectra = json.loads((Path(folder) / "spectra.json").read_text())["spectra"]
    shares = (0.125, 0.25, 0.5)
    rows, curves = [], {}
    for short, name in subject.layers.items():
        # A layer of fewer inputs than filters responds in as many dimensions as it has inputs.
        found = spectra[name]["channel"]
        values = found + [0.0] * (len(subject.model.get_submodule(name).weight) - len(found))
        total = sum(values)
        sums = [0.0]
        for value in values:
            sums.append(sums[-1] + value / total)
        curves[short] = sums
        needed = next(rank for rank, share in enumerate(sums) if share >= 0.99)
        rows.append([short, len(values), *(100 * sums[int(share * len(values))] for share in shares), needed])
    half = [row[4] for row in rows]
    return {
        "title": "PCA energy: % in an eighth, a quarter and half of the components; components that hold 99 %",
        "heads": ["layer", "filters", "d/8", "d/4", "d/2", "99 % at"],
        "rows": rows,
        "curves": curves,
        "claims": [
            claim(f"half of the components hold over 90 % in every layer (least {min(half):.1f} %)", min(half) > 90)
        ],
        "paper": "curves of SPP-10 only; most of the energy lies in a small part of the components.",
    }


def accuracy_energy(subject: Subject) -> Table:
    """Accuracy against the product of the layers' energies, over plans of many kinds."""
    generator = random.Random(0)
    layers = list(subject.layers.values())[1:]
    found = []
    for speedup in (2.0, 3.0, 4.0, 5.0):
        for ranks in ("uniform", "energy"):
            found.append(
                (f"{ranks} {speedup:g}x", *subject.accelerated(speedup, scheme="channel", ranks=ranks, **LINEAR))
            )
    widths = {name: subject.model.get_submodule(name).weight.shape[0] for name in layers}
    for share in (0.2, 0.3, 0.4, 0.5):
        plan = {name: max(1, int(widths[name] * share * generator.uniform(0.5, 1.5))) for name in layers}
        found.append((f"random, about {share:g} d", *subject.accelerated(ranks=plan, scheme="channel", **LINEAR)))
    rows = []
    for title, result, score in found:
        product = 1.0
        for layer in result.layers:
            product *= layer.energy
        rows.append([title, result.speedup, product, 100 * getattr(score, subject.error), *figures(subject, score)])
    rows.sort(key=lambda row: -row[2])
    correlation = _rank_correlation([row[2] for row in rows], [row[3] for row in rows])
    return {
        "title": "Accuracy against the product of PCA energies (linear, symmetric)",
        "heads": ["plan", "speed-up", "energy product", "accuracy %", *HEADS],
        "rows": rows,
        "claims": [
            claim(f"accuracy rises with the energy product (rank correlation {correlation:.2f})", correlation > 0.8)
        ],
        "paper": "a plot of SPP-10 only; accuracy goes with the energy.",
    }


def channel_rank(subject: Subject, name: str, speedup: float) -> int:
    """d' with which the layer costs 1 / speed-up: d' (k k c + d) = k k c d / speed-up."""
    weight = subject.model.get_submodule(name).weight
    d, patch = weight.shape[0], weight[0].numel()
    return max(1, int(d * patch / (speedup * (patch + d))))


def single(subject: Subject) -> Table:
    """One layer at a time, linear against nonlinear."""
    rows, wins, total = [], 0, 0
    sums = {"linear": 0.0, "nonlinear": 0.0}
    for short in ("conv2_2", "conv3_2", "conv4_1"):
        name = subject.layers[short]
        for speedup in subject.layer_speedups:
            rank = channel_rank(subject, name, speedup)
            scores = {
                solver: subject.accelerated(ranks={name: rank}, scheme="channel", solver=solver)[1]
                for solver in ("linear", "nonlinear")
            }
            rows.append(
                [short, f"{speedup}x", rank, *(value for s in scores.values() for value in figures(subject, s))]
            )
            wins += scores["nonlinear"].kl < scores["linear"].kl
            total += 1
            for solver, score in scores.items():
                sums[solver] += subject.increase(score)
    mean = {solver: value / total for solver, value in sums.items()}
    return {
        "title": "A single layer at several speed-ups of it: linear, then nonlinear",
        "heads": ["layer", "of it", "d'", *(f"{solver}: {head}" for solver in sums for head in HEADS)],
        "rows": rows,
        "claims": [
            claim(
                f"nonlinear beats linear: mean increase {mean['nonlinear']:.2f} against {mean['linear']:.2f} points",
                mean["nonlinear"] < mean["linear"],
            ),
            claim(f"nonlinear is closer to the original (KL) in {wins} of {total} cases", wins > 0.9 * total),
        ],
        "paper": "plots of SPP-10 only; nonlinear is better.",
    }


def asymmetric(subject: Subject) -> Table:
    """Two, three and twelve layers at once: fitted to exact inputs, or to those the layers before really give."""
    shorts = list(subject.layers)
    groups = {
        "conv3_2, 3_3": shorts[5:7],
        "conv3_1 to 3_3": shorts[4:7],
        "conv1_2 to 5_3": shorts[1:],
    }
    rows, margins, means = [], {}, {}
    for title, chosen in groups.items():
        gaps, kls = [], []
        for speedup in subject.group_speedups:
            names = [subject.layers[short] for short in chosen]
            plan = {name: channel_rank(subject, name, speedup) for name in names}
            scores = [
                subject.accelerated(ranks=plan, scheme="channel", asymmetric=asymmetric)[1]
                for asymmetric in (False, True)
            ]
            rows.append([title, f"{speedup}x", *(value for s in scores for value in figures(subject, s))])
            gaps.append(subject.increase(scores[0]) - subject.increase(scores[1]))
            kls.append(scores[0].kl - scores[1].kl)
        margins[title], means[title] = statistics.mean(gaps), statistics.mean(kls)
    growing = list(margins.values())
    kl = list(means.values())
    shown = ", ".join(f"{value:.2f}" for value in growing)
    return {
        "title": "Several layers, each this many times cheaper: symmetric, then asymmetric",
        "heads": ["layers", "of them", *(f"{way}: {head}" for way in ("symmetric", "asymmetric") for head in HEADS)],
        "rows": rows,
        "claims": [
            claim(
                f"asymmetric beats symmetric with 2, 3 and 12 layers (by {shown} points on average)", min(growing) > 0
            ),
            claim(f"the margin grows with depth (KL by {', '.join(f'{value:.3f}' for value in kl)})", kl == sorted(kl)),
        ],
        "paper": "plots of SPP-10 only; asymmetric is better, and more so with three layers than with two.",
    }


def whole(subject: Subject) -> Table:
    """The whole network, channel only: the same speed-up for all layers, or ranks selected by energy."""
    rows, better = [], []
    short = {name: key.removeprefix("conv") for key, name in subject.layers.items()}
    for speedup in subject.speedups:
        scores = {}
        for ranks in ("uniform", "energy"):
            result, scores[ranks] = subject.accelerated(speedup, scheme="channel", ranks=ranks)
            shown = " ".join(f"{short[layer.name]}:{layer.ranks[-1]}" for layer in result.layers)
            rows.append(
                [f"{speedup:g}x", "selected" if ranks == "energy" else ranks, *figures(subject, scores[ranks]), shown]
            )
        better.append(subject.increase(scores["energy"]) <= subject.increase(scores["uniform"]))
        better.append(scores["energy"].kl < scores["uniform"].kl)
    return {
        "title": "The whole network, channel scheme: uniform against selected ranks",
        "heads": ["speed-up", "ranks", *HEADS, "d' of every layer"],
        "rows": rows,
        "claims": [claim("selection beats uniform at every speed-up, in error and in KL", all(better))],
        "paper": (
            "VGG-16, increase of top-5 error at 2x / 3x / 4x: uniform 0.99 / 3.25 / 6.38, selected 0.28 / 1.66 / 3.84; "
            "ranks at 4x 11 25 28 52 46 56 104 92 100 232 224 214 for conv1_2 to conv5_3."
        ),
    }


def jaderberg(subject: Subject) -> Table:
    """Against the spatial split: of filters, and trained to data."""
    ways = {
        FILTERS: {"scheme": "spatial", "ranks": "uniform"},
        "channel": {"scheme": "channel"},
        "3d": {"scheme": "3d"},
    }
    rows, holds = [], []
    for speedup in subject.speedups:
        scores = {}
        for title, arguments in ways.items():
            result, scores[title] = subject.accelerated(speedup, **arguments)
            rows.append([f"{speedup:g}x", title, result.speedup, *figures(subject, scores[title])])
            if title == FILTERS:
                scores[DATA] = subject.score(train_spatial_pairs(subject.model, result, subject.calibration))
                rows.append([f"{speedup:g}x", DATA, result.speedup, *figures(subject, scores[DATA])])
        increase = {title: subject.increase(score) for title, score in scores.items()}
        holds.append(increase["3d"] < min(increase[FILTERS], increase[DATA]))
    return {
        "title": "Against Jaderberg's spatial split, without fine-tuning",
        "heads": ["speed-up", "scheme", "reached", *HEADS],
        "rows": rows,
        "claims": [
            claim("3d beats Jaderberg's split, of filters and of data, at every speed-up", all(holds)),
        ],
        "paper": (
            "VGG-16 at 3x / 4x / 5x: Jaderberg 2.3 / 9.7 / 29.7, 3d 0.4 / 0.9 / 2.0; SPP-10 at 4x: Jaderberg 6.0, "
            "channel 4.2, 3d 1.6."
        ),
    }


def three_d(subject: Subject) -> Table:
    """Channel and 3d, with the ranks of 3d."""
    rows, better = [], []
    short = {name: key.removeprefix("conv") for key, name in subject.layers.items()}
    for speedup in subject.speedups:
        _, channel = subject.accelerated(speedup, scheme="channel")
        result, both = subject.accelerated(speedup, scheme="3d")
        ranks = " ".join(f"{short[layer.name]}:{'x'.join(map(str, layer.ranks))}" for layer in result.layers)
        rows.append([f"{speedup:g}x", *figures(subject, channel), *figures(subject, both), ranks])
        better.append(subject.increase(both) <= subject.increase(channel) and both.kl < channel.kl)
    return {
        "title": "Channel, then 3d, without fine-tuning",
        "heads": ["speed-up", *(f"{way}: {head}" for way in ("channel", "3d") for head in HEADS), "d'' x d' of 3d"],
        "rows": rows,
        "claims": [claim("3d beats channel at every speed-up", all(better))],
        "paper": "VGG-16 at 3x / 4x / 5x: channel 1.66 / 3.84 / -, 3d 0.4 / 0.9 / 2.0; SPP-10 at 4x: 4.2 and 1.6.",
    }


def speed(subject: Subject) -> Table:
    """Theoretical against actual speed-up."""
    networks: dict[str, tuple[nn.Module, float]] = {"original": (subject.model, 1.0)}
    for scheme in ("channel", "3d"):
        result, _ = subject.accelerated(4.0, scheme=scheme)
        networks[f"{scheme} 4x"] = (result.model, result.speedup)
    batch = subject.pictures[0][:32]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a CPU, as the paper has it
    times: dict[str, list[float]] = {name: [] for name in networks}
    with torch.no_grad():
        for number in range(13):
            for name, (network, _) in networks.items():
                _wait(subject.device)
                started = time.perf_counter()
                network(batch)
                _wait(subject.device)
                if number >= 3:
                    times[name].append(1000 * (time.perf_counter() - started))
    torch.set_num_threads(threads)
    middle = {name: statistics.median(values) for name, values in times.items()}
    rows = [[name, theory, middle[name], middle["original"] / middle[name]] for name, (_, theory) in networks.items()]
    return {
        "title": f"Theoretical and actual speed-up, float32, batches of {len(batch)}, torch without compilation (a CPU "
        "with one thread)",
        "heads": ["network", "MACs ratio", "ms a batch", "time ratio"],
        "rows": rows,
        "claims": [],
        "paper": "4x in theory: 3.8x on a CPU thread, 3.0x on a K40.",
    }


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's."""

    def places(values: list[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        found = [0.0] * len(values)
        for place, index in enumerate(order):
            found[index] = float(place)
        return found

    return statistics.correlation(places(a), places(b))


TABLES: dict[str, Callable[[Subject], Table]] = {
    "energy": energy,
    "accuracy-energy": accuracy_energy,
    "single": single,
    "asymmetric": asymmetric,
    "whole": whole,
    "jaderberg": jaderberg,
    "3d": three_d,
    "speed": speed,
}
