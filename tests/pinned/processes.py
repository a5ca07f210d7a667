"""Runs in processes of their own: one that is killed and goes on, and two that work together.

``python -m tests.pinned.processes killed WORKDIR`` kills itself in the middle of a run;
``python -m tests.pinned.processes together OUT MEETING RANK WORLD`` is one of several.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.pinned.cells import KILLED, SHARED, Facts, facts

ROOT = Path(__file__).parents[2]


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.pinned.processes", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def resumed(folder: Path) -> Facts:
    """A run that was killed when it had solved one layer, and went on."""
    process = start("killed", str(folder / "work"))
    said = process.communicate(timeout=120)[1]
    assert process.returncode == -signal.SIGKILL, f"it was to be killed in the middle: {said}"
    solved = list((folder / "work" / "solved").glob("*.safetensors"))
    assert len(solved) == 1
    before = solved[0].stat().st_mtime_ns
    found = facts(KILLED.run(workdir=folder / "work"))
    assert solved[0].stat().st_mtime_ns == before, "what was solved before was solved again"
    return found


def together(folder: Path) -> Facts:
    """Two processes, which end with the same network."""
    outs = [folder / "0.json", folder / "1.json"]
    started = [start("together", str(out), str(folder / "meeting"), str(rank), "2") for rank, out in enumerate(outs)]
    said = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    one, other = (json.loads(out.read_text()) for out in outs)
    assert one == other
    return one  # type: ignore[no-any-return]


def _killed(workdir: str) -> None:
    """The system ends this process just before the second solved layer takes its place."""
    left = 2

    def watch(event: str, given: tuple[object, ...]) -> None:
        nonlocal left
        if event == "os.rename" and Path(str(given[1])).match("solved/*.safetensors"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    KILLED.run(workdir=workdir)


def _together(out: str, meeting: str, rank: str, world: str) -> None:
    """They meet over a file: a port that is free now may be taken a moment later."""
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(world))
    Path(out).write_text(json.dumps(facts(SHARED.run())))
    dist.barrier()
    time.sleep(0.3)  # gloo's threads let go of what was exchanged last
    dist.destroy_process_group()


if __name__ == "__main__":
    {"killed": _killed, "together": _together}[sys.argv[1]](*sys.argv[2:])
