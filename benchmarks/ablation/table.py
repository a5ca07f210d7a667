"""The ablation's cells as tables."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from benchmarks.ablation.rows import ROWS, SPEEDUPS, SUMMARY


def machines(cells: list[dict[str, Any]]) -> str:
    """Those the cells were found on, most of them first."""
    found = [one["machine"] for one in cells]
    return " and ".join(sorted(set(found), key=lambda name: (-found.count(name), name)))


def commits(cells: list[dict[str, Any]]) -> str:
    """Those the cells are of, most of them first, with their number."""
    found = Counter(one["code"] for one in cells)
    return ", ".join(f"{name} ({count})" for name, count in sorted(found.items(), key=lambda item: (-item[1], item[0])))


def timed(cells: list[dict[str, Any]]) -> str:
    """How many calls the seconds are of."""
    if all(one["seconds"] is None for one in cells):
        return "no seconds, as other jobs ran beside"
    counts = Counter((one["speedup"], one["row"]) for one in cells if one["seconds"] is not None)
    return f"seconds of calls that were alone on the machine, of {sum(n == 1 for n in counts.values())} rows one call"


def alone(cells: list[dict[str, Any]], form: str) -> str:
    """The seconds of cells that ran alone on the machine, their median; nothing if none did."""
    seconds = [one["seconds"] for one in cells if one["seconds"] is not None]
    return form.format(statistics.median(seconds)) if seconds else ""


def asked_for(name: str) -> str:
    """The word of the command by which a table is called otherwise."""
    return "" if name == "ablation" else f" --name {name}"


def markdown(cells: list[dict[str, Any]], asked: str = "") -> str:
    """A table for every network: a row for every way, seeds together. ``asked``: other words of the command."""
    lines: list[str] = []
    for model in dict.fromkeys(one["model"] for one in cells):
        own = [one for one in cells if one["model"] == model]
        base, beside = own[0]["original"], any("gained, low" in one for one in own)
        lines += [
            f"`python -m benchmarks.ablation.run --model {model}{asked}` on {machines(own)}. Original: top-1 "
            f"{base['top1']:.2f} %, top-5 {base['top5']:.2f} %; increase of the {base['error']} error in points, "
            "median of the seeds (each seed), the 95 % interval of that seed, paired with the original picture by "
            "picture, "
            + "that of what is gained over the paper's 3d of the same seed, paired alike, " * beside
            + f"KL from the original's outputs; {timed(own)}. Cells by commit: {commits(own)}.",
            "",
        ]
        for speedup in sorted({one["speedup"] for one in own}):
            clocked = any(one["seconds"] is not None for one in own)
            heads = [f"{speedup:g}x", "increase", "95 %", *["gained, 95 %"] * beside, "agreement %", "KL"]
            heads += ["seconds"] * clocked
            lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
            for row in ROWS:
                found = sorted(
                    (one for one in own if (one["speedup"], one["row"]) == (speedup, row)), key=lambda one: one["seed"]
                )
                if not found:
                    continue
                increase = [one["increase"] for one in found]
                middle = sorted(found, key=lambda one: one["increase"])[(len(found) - 1) // 2]
                each = ", ".join(f"{value:.2f}" for value in increase)
                kl, agreement = (statistics.median(one[key] for one in found) for key in ("kl", "agreement"))
                gained = (
                    f"{middle['gained, low']:.1f} to {middle['gained, high']:.1f}" if "gained, low" in middle else ""
                )
                shown = [
                    row,
                    f"{statistics.median(increase):.2f} ({each})",
                    f"{middle['low']:.1f} to {middle['high']:.1f}",
                ]
                shown += [*[gained] * beside, f"{agreement:.2f}", f"{kl:.4f}", *[alone(found, "{:.1f}")] * clocked]
                lines.append("| " + " | ".join(shown) + " |")
            lines.append("")
    return "\n".join(lines)


def summary(cells: list[dict[str, Any]]) -> str:
    """A row for every network and speed-up, a column for every way worth choosing; medians of the seeds."""
    cells = [one for one in cells if one["row"] in SUMMARY]
    seeds = len({one["seed"] for one in cells})
    lines = [
        f"`benchmarks/ablation/run.py` on {machines(cells)}: increase of the error in points (KL from the original's "
        f"outputs, seconds of a call alone on the machine), same MACs, no labels; medians of {seeds} seeds (seconds: "
        "mostly of one). The networks for ImageNet have 1,000 images, those for CIFAR-10 3,000. VGG-16 for ImageNet "
        "has a linear head and is judged by top-5, the others by top-1.",
        "",
        "| | " + " | ".join(SUMMARY.values()) + " |",
        "|---" * (1 + len(SUMMARY)) + "|",
    ]
    there = {one["model"] for one in cells}
    for model in [name for name in SPEEDUPS if name in there]:
        for speedup in SPEEDUPS[model]:
            row = [f"{model} {speedup:g}x"]
            for way in SUMMARY:
                found = [one for one in cells if (one["model"], one["speedup"], one["row"]) == (model, speedup, way)]
                medians = [statistics.median(one[key] for one in found) for key in ("increase", "kl") if found]
                row.append("{:.2f} ({:.3f}{})".format(*medians, alone(found, ", {:.1f} s")) if found else "")
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)
