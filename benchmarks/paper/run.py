"""The paper's classification experiments on whatever data there is, our numbers beside its own.

    python -m benchmarks.paper.run --table all --model vgg16-imagenet --data DIR --device cuda
    python -m benchmarks.paper.run --table finetuned --model vgg16-cifar10 --data CACHE --device cuda
    python -m benchmarks.paper.run --table finetuned --model vgg16-cifar10 --data CACHE --speedups 4 --out parts/4
    python -m benchmarks.paper.run --merge parts/4 parts/6  # tables measured in parts, put together
    python -m benchmarks.paper.run --plot                   # draw all results there are (needs matplotlib)

DIR (vgg16-imagenet) and CACHE (vgg16-cifar10): see benchmarks/README.md.
Calibration and training use calib.tar or the training pictures only; every figure is from val.tar or the test pictures.
Writes benchmarks/results/paper/MODEL/TABLE.json and .md, and TABLE.png and .svg with --plot.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import leanconv
from benchmarks.common.machine import machine
from benchmarks.common.results import RESULTS
from benchmarks.common.subjects import SUBJECTS, Subject
from benchmarks.paper.table import Table
from benchmarks.paper.trained import TABLES as TRAINED
from benchmarks.paper.untrained import TABLES as UNTRAINED

OUT = RESULTS / "paper"
TABLES = UNTRAINED | TRAINED


def markdown(table: Table) -> str:
    lines = [
        f"`{table['command']}` on {table['machine']}: {table['subject']}. {table['title']}. Original: top-1 "
        f"{100 * table['original']['top1']:.2f} %, top-5 {100 * table['original']['top5']:.2f} %; error increase is of "
        f"{'top-5' if table['error'] == 'top5' else 'top-1'}, in points.",
        "",
        "| " + " | ".join(table["heads"]) + " |",
        "|---" * len(table["heads"]) + "|",
        *("| " + " | ".join(_cell(value) for value in row) + " |" for row in table["rows"]),
        "",
        *(f"- {'holds' if item['holds'] else 'DOES NOT HOLD'}: {item['claim']}." for item in table["claims"]),
        f"- The paper: {table['paper']}",
    ]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 0.1 else f"{value:.2f}"
    return str(value)


def run(name: str, subject: Subject, out: Path, command: str) -> None:
    started = time.perf_counter()
    found = {
        "script": "benchmarks/paper/run.py",
        "command": command,
        "machine": machine(subject.device),
        "leanconv": leanconv.__version__,
        "subject": subject.title,
        "original": vars(subject.base),
        "error": subject.error,
        **TABLES[name](subject),
        "seconds": time.perf_counter() - started,
    }
    write(found, out / subject.name, name)
    print(markdown(found), f"({found['seconds']:.0f} s)\n", flush=True)


def write(table: Table, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(table, indent=1) + "\n")
    (folder / f"{name}.md").write_text(markdown(table))


def merge(parts: list[Path], out: Path) -> None:
    """Tables of the same name and network, their rows one after the other; a claim holds that holds in all."""
    for path in sorted({path.relative_to(part) for part in parts for path in part.glob("*/*.json")}):
        tables: list[Table] = [json.loads((part / path).read_text()) for part in parts if (part / path).exists()]
        whole = tables[0]
        if len(tables) > 1:
            whole["rows"] = [row for table in tables for row in table["rows"]]
            whole["command"] = ", ".join(table["command"] for table in tables)
            whole["seconds"] = sum(table["seconds"] for table in tables)
            for place, item in enumerate(whole["claims"]):
                item["holds"] = all(table["claims"][place]["holds"] for table in tables)
        write(whole, out / path.parent, path.stem)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", nargs="+", default=["all"], choices=[*TABLES, "all"])
    parser.add_argument("--model", choices=list(SUBJECTS))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int, help="use this many pictures of each set, to try things out")
    parser.add_argument("--speedups", type=float, nargs="+", help="of the whole network, in place of the model's own")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--merge", type=Path, nargs="+", help="only put together what was written to these folders")
    parser.add_argument("--plot", action="store_true", help="only draw what has been measured")
    options = parser.parse_args()
    if options.plot:
        from benchmarks.paper.plots import draw

        for path in sorted(options.out.glob("*/*.json")):
            draw(json.loads(path.read_text()), path)
        return
    if options.merge:
        merge(options.merge, options.out)
        return
    if options.model is None or options.data is None:
        parser.error("--model and --data are needed, or --plot, or --merge")
    subject = SUBJECTS[options.model](options.data, options.device, options.limit)
    if options.speedups:
        subject.speedups = tuple(options.speedups)
    print(f"{subject.title}: {subject.base}", flush=True)
    every = [name for name in TABLES if name != "labels" or subject.supervised]
    for name in every if "all" in options.table else options.table:
        more = f" --limit {options.limit}" if options.limit else ""
        more += f" --speedups {' '.join(f'{speedup:g}' for speedup in options.speedups)}" if options.speedups else ""
        run(name, subject, options.out, f"python -m benchmarks.paper.run --table {name} --model {options.model}{more}")


if __name__ == "__main__":
    main()
