"""What ``benchmarks.kernels.run`` has measured, as tables."""

from __future__ import annotations

import math
from typing import Any

NAMES = {
    "original - eager": "original, torch",
    "original - graph": "original, torch, CUDA graph",
    "original - compiled": 'original, `torch.compile(mode="max-autotune")`',
    "accelerated channel eager": "4x, torch",
    "accelerated channel graph": "4x, torch, CUDA graph",
    "accelerated channel compiled": '4x, `torch.compile(mode="max-autotune")`',
    "accelerated 3d eager": "4x 3d, torch",
    "fused channel eager": "4x, fused kernels",
    "fused channel graph": "4x, fused kernels, CUDA graph",
    "fused channel compiled": '4x, fused kernels, `torch.compile(mode="max-autotune")`',
    "fused 3d eager": "4x 3d, fused kernels",
    "fused 3d graph": "4x 3d, fused kernels, CUDA graph",
}


def stack_table(name: str, setting: dict[str, Any]) -> list[str]:
    times = setting["milliseconds"]
    bases = [one for one in NAMES if one.startswith("original") and one in times]
    lines = [f"All convolutions of VGG-16 at 224 px, with ReLU and pooling, channels-last, {name}, milliseconds:", ""]
    lines += ["| network | median | smallest to largest of five | " + " | ".join(f"x {NAMES[b]}" for b in bases) + " |"]
    lines += ["|" + "---|" * (3 + len(bases))]
    for one, label in NAMES.items():
        if one in times:
            median, least, most = times[one]
            ratios = " | ".join(f"{times[base][0] / median:.2f}" for base in bases)
            lines.append(f"| {label} | {median:.3f} | {least:.3f} to {most:.3f} | {ratios} |")
    if "TF32" in name and any(one.endswith("compiled") for one in times):
        lines += [
            "",
            "Compiled with cuDNN's convolutions alone: to try Triton's too, as max-autotune does, takes minutes.",
        ]
    missing = [f"{NAMES[one]} ({why})" for one, why in setting["problems"].items()]
    return [*lines, "", *([f"Not measured: {', '.join(missing)}.", ""] if missing else [])]


def markdown(report: dict[str, Any]) -> str:
    lines = [f"{report['machine']}. `python -m benchmarks.kernels.run`", ""]
    if "check" in report:
        found = report["check"]
        worst = ", ".join(
            f"{dtype} {value:.1e}" for dtype, value in found["largest error"].items() if value is not None
        )
        lines += [
            f"{found['cases']} runs of {found['layers']} random layers against float64 (bfloat16, "
            f"float16, and float32 in TF32): {len(found['wrong'])} wrong, largest relative error {worst}; "
            "every element written, nothing beside them. "
            f"{found['did not fit']} runs more ask for more shared memory or registers than there is; such are never "
            "chosen.",
            "",
        ]
    if "sanitizer" in report:
        found = report["sanitizer"]
        said = found if isinstance(found, str) else f"{found['cases']} of them: " + found["said"][-1].strip("= ")
        lines += [f"compute-sanitizer --tool memcheck: {said}.", ""]
    if "stacks" in report:
        fewer = ", ".join(f"{scheme} {ratio:.2f}x" for scheme, ratio in report["macs"].items())
        lines += [
            f"4x is, in multiply-accumulates of all convolutions: {fewer} fewer; channel where nothing is said.",
            "",
        ]
    for name, setting in report.get("stacks", {}).items():
        lines += stack_table(name, setting)
    for batch, rows in report.get("layers", {}).items():
        lines += [
            f"Layer by layer, bfloat16, {batch}, microseconds (pooling included where it follows); limit: the products"
        ]
        lines += ["at 989 TFLOP/s, or the maps once to and from memory at 4.8 TB/s, whichever takes longer:", ""]
        lines += ["| layer | c - d' - d | original | 4x, torch | 4x, fused | limit | fused / limit | kernel |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for row in rows:
            original, accelerated, fused, least = (
                1e6 * (row[key] or math.nan) for key in ("original", "accelerated", "fused", "limit")
            )
            way = row["best"]["form"]
            ranks = " - ".join(str(rank) for rank in row["ranks"] if rank is not None)
            lines.append(
                f"| {row['layer']} | {ranks} | {original:.0f} | {accelerated:.0f} | {fused:.0f} | {least:.0f} | "
                f"{fused / least:.1f} | {way} |"
            )
        totals = [1e6 * sum(row[key] or math.nan for row in rows) for key in ("original", "accelerated", "fused")]
        lines += [f"| all | | {totals[0]:.0f} | {totals[1]:.0f} | {totals[2]:.0f} | | | |", ""]
    return "\n".join(lines)
