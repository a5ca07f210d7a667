"""The figures of the guide: measured on digits, drawn once for light and once for dark pages.

python docs/figures.py              # measure (minutes), write measured.json, draw
python docs/figures.py --draw       # draw again from measured.json
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor, nn

import leanconv
from leanconv.demo import CALIBRATION, METHODS, TRAINING, digits, train
from leanconv.evaluation.classification import accuracy, logits_of
from leanconv.solve import spectrum

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Polygon, Rectangle

FOLDER = Path(__file__).parent / "figures"
LAYER = "17"  # the middle of the network: 96 filters on 8 x 8
SPEEDUPS = (2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
INKS = {"light": "#24292f", "dark": "#dfe3e8"}
# Told apart on white and on near black, and by people who do not see red from green.
BLUE, ORANGE, GREEN, PINK, GREY, PURPLE = "#0f7fc4", "#d9730d", "#0a9a74", "#c8589b", "#858b92", "#7d6bd6"
COLOURS = dict(zip(METHODS, (GREY, PINK, ORANGE, GREEN, PURPLE, BLUE), strict=True))

Measured = dict[str, Any]


def relus(model: nn.Module, layers: list[str], pictures: Tensor) -> dict[str, Tensor]:
    """What stands behind the activation of each convolution: the ReLU is two places behind it."""
    found: dict[str, Tensor] = {}
    hooks = [
        model.get_submodule(str(int(name) + 2)).register_forward_hook(
            lambda module, given, answer, name=name: found.__setitem__(name, answer.clone())
        )
        for name in layers
    ]
    with torch.no_grad():
        model(pictures)
    for hook in hooks:
        hook.remove()
    return found


def measure(*, epochs: int = 6, samples: int = 5000, speedups: tuple[float, ...] = SPEEDUPS) -> Measured:
    """Everything the figures show. The 797 digits that errors and accuracies are of were never seen."""
    pictures, labels = digits()
    model = train(pictures[:TRAINING], labels[:TRAINING], epochs=epochs)
    calibration, test, truth = pictures[:CALIBRATION], pictures[TRAINING:], labels[TRAINING:]

    def run(speedup: float, **arguments: Any) -> leanconv.Accelerated:
        return leanconv.accelerate(model, calibration, speedup, **arguments, samples=samples, progress=False)

    def score(network: nn.Module) -> float:
        return accuracy(logits_of(network, test.split(100), "cpu"), truth).top1

    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)][1:]
    exact = relus(model, layers, test)
    depth = {}
    for way in ("nonlinear, symmetric", "nonlinear, asymmetric"):
        got = relus(run(4.0, **METHODS[way]).model, layers, test)
        depth[way] = [float((got[name] - exact[name]).norm() / exact[name].norm()) for name in layers]
    spectra = {name: energies(model, name, calibration) for name in layers}
    chosen = run(4.0, scheme="channel", refine="none")
    filters = model.get_submodule(LAYER).out_channels
    fits = {}
    for solver in ("linear", "nonlinear"):
        ranks = [max(1, round(share * filters)) for share in (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)]
        fits[solver] = {
            str(rank): run(1.0, scheme="channel", solver=solver, refine="none", ranks={LAYER: rank}).layers[0].error
            for rank in ranks
        }
    return {
        "machine": f"{platform.machine()} CPU, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "original": score(model),
        "images": len(test),
        "layers": layers,
        "depth": depth,
        "spectra": spectra,
        "ranks": {layer.name: layer.ranks[0] for layer in chosen.layers},
        "layer": LAYER,
        "fits": fits,
        "accuracy": {
            name: [[(found := run(speedup, **arguments)).speedup, score(found.model)] for speedup in speedups]
            for name, arguments in METHODS.items()
        },
    }


def energies(model: nn.Module, layer: str, pictures: Tensor) -> list[float]:
    """Share of the variance of a layer's responses that the first 0, 1, 2 ... principal components keep."""
    responses: list[Tensor] = []
    norm = model.get_submodule(str(int(layer) + 1))  # batch norm, which is part of the response
    hook = norm.register_forward_hook(lambda module, given, answer: responses.append(answer.clone()))
    with torch.no_grad():
        model(pictures)
    hook.remove()
    values = spectrum(responses[0].movedim(1, 3).flatten(0, 2))  # positions x filters
    return [0.0, *(values.cumsum(0) / values.sum()).tolist()]


# -- drawing -----------------------------------------------------------------------------------------------------------


def slab(axes: Axes, x: float, y: float, width: float, height: float, colour: str, text: str, ink: str) -> None:
    """A box with a little depth, and what it is below it."""
    lean = 0.12
    for corners in (
        [
            (x, y + height),
            (x + lean, y + height + lean),
            (x + width + lean, y + height + lean),
            (x + width, y + height),
        ],
        [(x + width, y), (x + width + lean, y + lean), (x + width + lean, y + height + lean), (x + width, y + height)],
    ):
        axes.add_patch(Polygon(corners, closed=True, facecolor=colour, alpha=0.55, edgecolor=ink, linewidth=0.8))
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=ink, linewidth=0.8))
    axes.text(x + width / 2, y - 0.14, text, ha="center", va="top", fontsize=9, linespacing=1.4)


def arrow(axes: Axes, start: float, end: float, y: float, ink: str, text: str = "") -> None:
    axes.add_patch(FancyArrowPatch((start, y), (end, y), arrowstyle="-|>", mutation_scale=11, color=ink, linewidth=1))
    axes.text((start + end) / 2, y + 0.09, text, ha="center", fontsize=8.5)


def draw_layer(measured: Measured, ink: str) -> Figure:
    """A layer, and what the three schemes put in its place; the heights of the boxes are numbers of channels."""
    rows: list[tuple[str, list[tuple[str, float, str]]]] = [
        ("the layer", [("d filters\nk x k x c", 1.0, GREY)]),
        ("channel", [("d′ filters\nk x k x c", 0.4, BLUE), ("d filters\n1 x 1 x d′", 1.0, ORANGE)]),
        ("spatial", [("d″ filters\nk x 1 x c", 0.5, GREEN), ("d filters\n1 x k x d″", 1.0, GREEN)]),
        (
            "3d",
            [
                ("d″ filters\nk x 1 x c", 0.5, GREEN),
                ("d′ filters\n1 x k x d″", 0.4, BLUE),
                ("d filters\n1 x 1 x d′", 1.0, ORANGE),
            ],
        ),
    ]
    figure, axes = plt.subplots(figsize=(7.2, 6.2))
    for number, (title, boxes) in enumerate(rows):
        base = -1.95 * number
        middle = base + 0.5
        axes.text(-1.5, middle, title, fontsize=11, fontweight="bold", va="center")
        places = [3.0] if len(boxes) == 1 else [1.9, 4.1] if len(boxes) == 2 else [1.1, 3.0, 4.9]
        edge = 0.0
        names = ["c", *(["d′"] if title == "channel" else ["d″"] if title == "spatial" else ["d″", "d′"])]
        for (text, height, colour), place, channels in zip(boxes, places, names, strict=False):
            arrow(axes, edge, place - 0.3, middle, ink, channels)
            slab(axes, place - 0.25, middle - height / 2, 0.5, height, colour, text, ink)
            edge = place + 0.42
        arrow(axes, edge, 6.35, middle, ink, "d")
    axes.set(xlim=(-1.6, 6.5), ylim=(-6.6, 1.35))
    axes.set_aspect("equal")
    axes.axis("off")
    return figure


def draw_energy(measured: Measured, ink: str) -> Figure:
    figure, axes = plt.subplots(figsize=(7.2, 4.0))
    names = [name for name in ("3", "10", "17", "24") if name in measured["spectra"]]
    for name, colour in zip(names, (ORANGE, GREEN, BLUE, PURPLE), strict=False):
        sums = measured["spectra"][name]
        filters = len(sums) - 1
        rank = measured["ranks"].get(name, filters)
        shares = [100 * number / filters for number in range(filters + 1)]
        kept = [100 * value for value in sums]
        axes.plot(shares, kept, color=colour, label=f"layer {name}: rank {rank} of {filters}")
        axes.plot(shares[rank], kept[rank], "o", color=colour, markersize=8, markeredgecolor=ink)
    axes.set(xlabel="components kept, % of filters", ylabel="variance of responses kept, %", ylim=(0, 102))
    axes.legend(loc="lower right")
    return figure


def draw_nonlinear(measured: Measured, ink: str) -> Figure:
    figure, axes = plt.subplots(figsize=(7.2, 3.6))
    for solver, colour in (("linear", GREY), ("nonlinear", BLUE)):
        fits = measured["fits"][solver]
        axes.plot([int(rank) for rank in fits], list(fits.values()), "-o", color=colour, label=solver)
    axes.set(xlabel=f"rank of layer {measured['layer']}", ylabel="relative error behind the ReLU", ylim=(0, None))
    axes.legend()
    return figure


def draw_depth(measured: Measured, ink: str) -> Figure:
    figure, axes = plt.subplots(figsize=(7.2, 3.6))
    for (way, errors), colour in zip(measured["depth"].items(), (ORANGE, BLUE), strict=True):
        axes.plot(range(len(errors)), errors, "-o", color=colour, label=way.split(", ")[1])
    axes.set_xticks(range(len(measured["layers"])), measured["layers"])
    axes.set(xlabel="layer, from shallow to deep", ylabel="relative error of its output", ylim=(0, None))
    axes.legend()
    return figure


def draw_digits(measured: Measured, ink: str) -> Figure:
    figure, axes = plt.subplots(figsize=(7.2, 4.2))
    axes.axhline(100 * measured["original"], color=ink, linewidth=0.8, linestyle=":")
    for name, points in measured["accuracy"].items():
        times, scores = zip(*points, strict=True)
        width = 2.4 if name == "3d" else 1.4
        axes.plot(
            times,
            [100 * value for value in scores],
            "-o",
            color=COLOURS[name],
            label=name,
            linewidth=width,
            markersize=4,
        )
    axes.set_xscale("log", base=2)
    ticks = [round(point[0]) for point in measured["accuracy"]["3d"]]
    axes.set_xticks(ticks, [f"{tick}x" for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel="fewer MACs", ylabel=f"accuracy, % of {measured['images']} digits", ylim=(0, 102))
    axes.legend(loc="center left")
    return figure


FIGURES: dict[str, Callable[[Measured, str], Figure]] = {
    "layer": draw_layer,
    "energy": draw_energy,
    "nonlinear": draw_nonlinear,
    "depth": draw_depth,
    "digits": draw_digits,
}


def draw(measured: Measured, folder: Path) -> list[Path]:
    """NAME.svg for light pages and NAME-dark.svg for dark ones, without a background."""
    written = []
    for name, picture in FIGURES.items():
        for page, ink in INKS.items():
            style = {
                **{f"{part}.color": ink for part in ("text", "xtick", "ytick")},
                **{"axes.edgecolor": ink, "axes.labelcolor": ink, "axes.facecolor": "none", "figure.facecolor": "none"},
                **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25},
                **{"grid.color": ink, "legend.frameon": False, "font.size": 10, "font.family": "DejaVu Sans"},
                "svg.hashsalt": "leanconv",  # the same figure, the same file
            }
            with plt.rc_context(style):
                figure = picture(measured, ink)
                path = folder / f"{name}{'-dark' if page == 'dark' else ''}.svg"
                figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
                plt.close(figure)
            written.append(path)
    return written


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw again from measured.json")
    options = parser.parse_args(arguments)
    path = FOLDER / "measured.json"
    if not options.draw:
        FOLDER.mkdir(exist_ok=True)
        path.write_text(json.dumps(measure(), indent=1) + "\n")
    for drawn in draw(json.loads(path.read_text()), FOLDER):
        print(drawn.relative_to(FOLDER.parent))


if __name__ == "__main__":
    main()
