"""kill -9 at random moments of a run: does it go on, end in the same bits, and leave nothing behind?

    python -m benchmarks.engine.kill --moments 10

Every moment has a workdir of its own: a run is killed there at a random time between its start and its end, and
started again with the same arguments. The network it ends with is compared, bit for bit, with that of a run nobody
disturbed. Writes benchmarks/results/kill.json and .md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.results import RESULTS, ROOT, write_results

THREADS = 1


def work(folder: str | None, out: str) -> None:
    """One run: ResNet-18 with random weights on 32 random images of 64 x 64."""
    import torch
    import torchvision

    import leanconv

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None).eval()
    images = torch.randn(32, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    result = leanconv.accelerate(model, images, 2.0, samples=5_000, refine="none", progress=False, workdir=folder)
    total = hashlib.sha256()
    for name, tensor in result.model.state_dict().items():
        total.update(name.encode() + tensor.contiguous().numpy().tobytes())
    total.update(repr([vars(layer) for layer in result.layers]).encode())
    facts = {"digest": total.hexdigest(), "original": "original network" in result.seconds}
    Path(out).write_text(json.dumps(facts))


def start(folder: Path | None, out: Path, scratch: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.engine.kill", "--work", str(folder or ""), str(out)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "TMPDIR": str(scratch)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work[0] or None, options.work[1])
        return
    draw = random.Random(options.seed)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        root, scratch = Path(place), Path(place) / "tmp"
        scratch.mkdir()
        started = time.monotonic()
        if start(None, root / "whole", scratch).wait():
            raise SystemExit("the undisturbed run failed")
        duration = time.monotonic() - started
        wanted = json.loads((root / "whole").read_text())["digest"]
        usual = {path.name for path in scratch.iterdir()}  # torch makes a cache folder of its own
        for number in range(options.moments):
            folder, out = root / f"work{number}", root / f"out{number}"
            moment = draw.uniform(0.0, duration)
            process = start(folder, out, scratch)
            time.sleep(moment)
            process.send_signal(signal.SIGKILL)
            process.wait()
            row: dict[str, Any] = {
                "moment": moment,
                "finished": out.exists(),
                "sites": len(list(folder.glob("solved/*.safetensors"))),
                "statistics": (folder / "statistics").exists(),
            }
            out.unlink(missing_ok=True)
            again = time.monotonic()
            row["code"] = start(folder, out, scratch).wait()
            row["again"] = time.monotonic() - again
            row["equal"] = out.exists() and json.loads(out.read_text())["digest"] == wanted
            left = {path.name for path in [*folder.rglob("*.part"), *scratch.iterdir()]}
            row["left"] = sorted(left - usual)
            rows.append(row)
            print(row, flush=True)
    heads = (
        "| killed after, s | statistics there | sites solved | started again: s | same bits | temporary files left |"
    )
    lines = [
        f"ResNet-18, 32 images, {duration:.1f} s undisturbed; "
        f"`python -m benchmarks.engine.kill --moments {options.moments}`",
        "",
        heads,
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row["moment"]):
        lines.append(
            f"| {row['moment']:.1f} | {'yes' if row['statistics'] else 'no'} | {row['sites']} | {row['again']:.1f} | "
            f"{'yes' if row['equal'] else 'NO'} | {', '.join(row['left']) or 'none'} |"
        )
    write_results(options.out, "kill", {"duration": duration, "rows": rows}, "\n".join(lines))
    if not all(row["equal"] and not row["left"] for row in rows):
        raise SystemExit("a run did not end as it should")


if __name__ == "__main__":
    main()
