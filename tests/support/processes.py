"""Processes of a test's own, alone or together as torchrun starts them.

They are forked from one process that has imported torch and leanconv, so that each starts at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

import leanconv
from tests.support.networks import plain_network, residual_network
from tests.support.pictures import smooth_images

ROOT = Path(__file__).parents[2]
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload([__name__, "tests.support.training", "leanconv.api"])
KNOWN = {
    "leanconv": leanconv,
    "torch": torch,
    "plain_network": plain_network,
    "residual_network": residual_network,
    "smooth_images": smooth_images,
}


def apart(function: Callable[..., None], *given: object, processes: int = 1) -> list[int | None]:
    """Exit codes of processes that each run ``function``."""
    return [code for code, _ in run_processes(function, given, processes)]


def together(text: str, processes: int = 2) -> list[tuple[int | None, str]]:
    """Exit code and stderr of processes that exchange over gloo and each run ``text``.

    The text knows ``rank`` and the names in ``KNOWN``.
    """
    # They meet over a file: a port that was free a moment ago may be taken by another test.
    meeting = Path(tempfile.mkdtemp()) / "meeting"
    return run_processes(_in_group, (text, meeting), processes)


def run_processes(
    function: Callable[..., None], given: tuple[object, ...], processes: int
) -> list[tuple[int | None, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with _at_root():  # else the server would not find the tests, and every process would import everything
        multiprocessing.forkserver.ensure_running()
    said = [Path(tempfile.mkdtemp()) / "stderr" for _ in range(processes)]
    started = [
        FORKED.Process(target=_process, args=(function, given, rank, processes, port, said[rank]))
        for rank in range(processes)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
        process.kill()
        process.join()
    return [(process.exitcode, path.read_text()) for process, path in zip(started, said, strict=True)]


@contextmanager
def _at_root() -> Iterator[None]:
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        yield
    finally:
        os.chdir(before)


def _process(
    function: Callable[..., None], given: tuple[object, ...], rank: int, world: int, port: int, said: Path
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()})
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    function(*given)


def _in_group(text: str, meeting: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    try:
        exec(text, {"rank": rank, "world": world, **KNOWN})
    finally:
        time.sleep(0.3)  # gloo's threads let go of what was exchanged last a moment later; ending before is an abort
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
