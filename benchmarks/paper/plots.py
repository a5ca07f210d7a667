"""Plots of the paper's experiments, from the JSON files of benchmarks.paper.run."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

matplotlib.rcParams["svg.hashsalt"] = "leanconv"  # the same plot, the same file

Table = dict[str, Any]
Rows = list[list[Any]]


def _column(table: Table, head: str, rows: Rows | None = None) -> list[Any]:
    place = table["heads"].index(head)
    return [row[place] for row in (table["rows"] if rows is None else rows)]


def _times(rows: Rows, place: int) -> list[float]:
    """4x -> 4."""
    return [float(row[place].removesuffix("x")) for row in rows]


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
        axes.plot(_column(table, "energy product", rows), _column(table, "accuracy %", rows), marker, label=kind)
    axes.set(xlabel="product of PCA energies", ylabel="accuracy, %")
    axes.legend()


def _pairs(first: str, second: str, measure: str, **labels: str) -> Callable[[Table, Axes], None]:
    """For each text in the first column, ``measure`` of two ways over speed-ups: dashed, then solid."""

    def draw(table: Table, axes: Axes) -> None:
        colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
        for title, colour in zip(dict.fromkeys(row[0] for row in table["rows"]), colours, strict=False):
            rows = [row for row in table["rows"] if row[0] == title]
            for way, line in ((first, "--o"), (second, "-o")):
                y = _column(table, f"{way}: {measure}", rows)
                axes.plot(_times(rows, 1), y, line, color=colour, markersize=3, label=f"{title}, {way}")
        axes.set(xticks=sorted(set(_times(table["rows"], 1))), **labels)
        axes.legend(fontsize=7, handlelength=3.5)

    return draw


def _by_speed(key: int) -> Callable[[Table, Axes], None]:
    """The error over speed-ups, a line for each text in column ``key``."""

    def draw(table: Table, axes: Axes) -> None:
        for title in dict.fromkeys(row[key] for row in table["rows"]):
            rows = [row for row in table["rows"] if row[key] == title]
            axes.plot(_times(rows, 0), _column(table, "error increase", rows), "-o", label=title)
        axes.set(xlabel="speed-up", ylabel="increase of error, points", xticks=sorted(set(_times(table["rows"], 0))))
        axes.legend()

    return draw


def _two(first: str, second: str) -> Callable[[Table, Axes], None]:
    """The error over speed-ups, of two kinds of columns."""

    def draw(table: Table, axes: Axes) -> None:
        x = _times(table["rows"], 0)
        for kind in (first, second):
            axes.plot(x, _column(table, f"{kind}: error increase"), "-o", label=kind)
        axes.axhline(0, color="0.7", linewidth=0.8)
        axes.set(xlabel="speed-up", ylabel="increase of error, points", xticks=x)
        axes.legend()

    return draw


def _bars(head: str, label: str) -> Callable[[Table, Axes], None]:
    def draw(table: Table, axes: Axes) -> None:
        bars = axes.bar([row[0] for row in table["rows"]], _column(table, head), width=0.5)
        axes.bar_label(bars, fmt="%.2f")
        axes.set(ylabel=label)

    return draw


PLOTS: dict[str, Callable[[Table, Axes], None]] = {
    "energy": _energy,
    "accuracy-energy": _accuracy_energy,
    "single": _pairs(
        "linear",
        "nonlinear",
        "KL",
        xlabel="speed-up of the layer",
        ylabel="KL from the original's outputs",
        yscale="log",
    ),
    "asymmetric": _pairs(
        "symmetric",
        "asymmetric",
        "error increase",
        xlabel="speed-up of these layers",
        ylabel="increase of error, points",
    ),
    "whole": _by_speed(1),
    "jaderberg": _by_speed(1),
    "3d": _two("channel", "3d"),
    "finetuned": _two("before", "after"),
    "past": _two("before", "after"),
    "labels": _two("before", "after"),
    "scratch": _bars("error increase", "increase of error, points"),
    "speed": _bars("time ratio", "times faster than the original"),
}


def draw(table: Table, path: Path) -> None:
    """Beside the JSON at ``path``, as PNG and SVG."""
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    PLOTS[path.stem](table, axes)
    title = textwrap.fill(table["title"].partition(":")[0], 80)
    axes.set_title(f"{table['subject']}\n{title}", fontsize=9)
    axes.grid(alpha=0.25)
    figure.savefig(path.with_suffix(".png"), dpi=110)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)
    print(path.with_suffix(".png"))
