"""Plots of the paper's experiments, from the JSON paper.py wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

Table = dict[str, Any]


def _energy(table: Table, axes: Axes) -> None:
    colours = plt.get_cmap("viridis")
    for number, (name, sums) in enumerate(table["curves"].items()):
        share = [100 * rank / (len(sums) - 1) for rank in range(len(sums))]
        colour = colours(number / (len(table["curves"]) - 1))
        axes.plot(share, [100 * value for value in sums], label=name, linewidth=1.2, color=colour)
    axes.set(xlabel="components kept, % of filters", ylabel="PCA energy, %", ylim=(40, 101))
    axes.legend(fontsize=7, ncol=2)


def _accuracy_energy(table: Table, axes: Axes) -> None:
    for kind, marker in (("uniform", "o"), ("energy", "s"), ("random", "x")):
        rows = [row for row in table["rows"] if row[0].startswith(kind)]
        axes.plot([row[2] for row in rows], [row[3] for row in rows], marker, label=kind)
    axes.set(xlabel="product of PCA energies", ylabel="accuracy, %")
    axes.legend()


def _single(table: Table, axes: Axes) -> None:
    layers = list(dict.fromkeys(row[0] for row in table["rows"]))
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for layer, colour in zip(layers, colours, strict=False):
        rows = [row for row in table["rows"] if row[0] == layer]
        x = [float(row[1].removesuffix("x")) for row in rows]
        axes.plot(x, [row[5] for row in rows], "--o", color=colour, markersize=3, label=f"{layer} linear")
        axes.plot(x, [row[8] for row in rows], "-o", color=colour, markersize=3, label=f"{layer} nonlinear")
    axes.set(xlabel="speed-up of the layer", ylabel="KL from the original's outputs", yscale="log")
    axes.legend(fontsize=7, handlelength=3.5)


def _asymmetric(table: Table, axes: Axes) -> None:
    groups = list(dict.fromkeys(row[0] for row in table["rows"]))
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for group, colour in zip(groups, colours, strict=False):
        rows = [row for row in table["rows"] if row[0] == group]
        x = [float(row[1].removesuffix("x")) for row in rows]
        axes.plot(x, [row[2] for row in rows], "--o", color=colour, markersize=3, label=f"{group}, symmetric")
        axes.plot(x, [row[5] for row in rows], "-o", color=colour, markersize=3, label=f"{group}, asymmetric")
    axes.set(xlabel="speed-up of these layers", ylabel="increase of error, points", xticks=x)
    axes.legend(fontsize=7, handlelength=3.5)


def _by_speed(key: int, value: int) -> Callable[[Table, Axes], None]:
    """Lines of column ``value`` over speed-ups, one for each text in column ``key``."""

    def draw(table: Table, axes: Axes) -> None:
        for title in dict.fromkeys(row[key] for row in table["rows"]):
            rows = [row for row in table["rows"] if row[key] == title]
            x = [float(row[0].removesuffix("x")) for row in rows]
            axes.plot(x, [row[value] for row in rows], "-o", label=title)
        axes.set(xlabel="speed-up", ylabel="increase of error, points", xticks=x)
        axes.legend()

    return draw


def _two(first: str, second: str) -> Callable[[Table, Axes], None]:
    """Columns 1 and 4 over speed-ups."""

    def draw(table: Table, axes: Axes) -> None:
        x = [float(row[0].removesuffix("x")) for row in table["rows"]]
        axes.plot(x, [row[1] for row in table["rows"]], "-o", label=first)
        axes.plot(x, [row[4] for row in table["rows"]], "-o", label=second)
        axes.axhline(0, color="0.7", linewidth=0.8)
        axes.set(xlabel="speed-up", ylabel="increase of error, points", xticks=x)
        axes.legend()

    return draw


def _bars(value: int, label: str) -> Callable[[Table, Axes], None]:
    def draw(table: Table, axes: Axes) -> None:
        bars = axes.bar([row[0] for row in table["rows"]], [row[value] for row in table["rows"]], width=0.5)
        axes.bar_label(bars, fmt="%.2f")
        axes.set(ylabel=label)

    return draw


PLOTS: dict[str, Callable[[Table, Axes], None]] = {
    "energy": _energy,
    "accuracy-energy": _accuracy_energy,
    "single": _single,
    "asymmetric": _asymmetric,
    "whole": _by_speed(1, 2),
    "jaderberg": _by_speed(1, 3),
    "3d": _two("channel", "3d"),
    "finetuned": _two("3d", "3d, fine-tuned"),
    "scratch": _bars(1, "increase of error, points"),
    "speed": _bars(3, "times faster than the original"),
}


def draw(table: Table, path: Path) -> None:
    """Beside the JSON at ``path``, as PNG and SVG."""
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    PLOTS[path.stem](table, axes)
    axes.set_title(f"{table['subject']}\n{table['title'].partition(':')[0]}", fontsize=9)
    axes.grid(alpha=0.25)
    figure.savefig(path.with_suffix(".png"), dpi=110)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)
    print(path.with_suffix(".png"))
