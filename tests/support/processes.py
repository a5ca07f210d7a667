"""Processes that work together, as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAD = """
import atexit, os, sys, time, torch, torch.distributed as dist
sys.path.insert(0, {root!r})
torch.set_num_threads(1)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# They meet over a file: a port that was free a moment ago may be taken by another test.
dist.init_process_group("gloo", init_method="file://" + os.environ["MEETING"], rank=rank, world_size=world)
# A moment later gloo's threads let go of what was exchanged last; while the interpreter ends, that aborts the process.
atexit.register(time.sleep, 0.3)
atexit.register(dist.destroy_process_group)
import leanconv
from tests.support.networks import plain_network, residual_network
from tests.support.pictures import smooth_images
"""


def together(text: str, processes: int = 2) -> list[tuple[int, str]]:
    """Exit code and stderr of every process."""
    meeting = Path(tempfile.mkdtemp()) / "meeting"
    started = []
    for rank in range(processes):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "MEETING": str(meeting),
        }
        command = [sys.executable, "-c", HEAD.format(root=str(ROOT)) + text]
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT))
    return [(process.returncode, said) for process, said in [(p, p.communicate(timeout=60)[1]) for p in started]]
