"""How many threads torch computes with on a CPU: as many as there are idle cores, where nobody has said how many.

Threads wait for each other after every operation. Where another process has a core, all wait for the thread that should
run there, and keep their own cores busy meanwhile: on two busy cores two threads took several times as long as one. How
many threads share the work decides the last bits of sums, of factorisations and of some products."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from leanconv.errors import LeanconvError, whole

STAT, CGROUP, CPUS = Path("/proc/stat"), Path("/sys/fs/cgroup"), Path("/sys/devices/system/cpu")
MOST = 1024  # threads; libgomp ends the process where the system has no room for them
SMALL = 5e7  # multiply-adds of a product, a millisecond of one core; below, two threads need twice its CPU time
SHORT = 0.05  # seconds a look at the load takes: the system counts hundredths
RECENT = 5.0  # seconds; the load since a look that was longer ago says little about now
SPINS = "1000"  # about as long as it takes to wake a thread up, 0.05 ms; libgomp's own number is 300 times as many

_seen: tuple[float, float] | None = None  # when this process looked at the load last, and what ``_others_worked`` then


def cores() -> int:
    """Cores this process may use; in a container or under taskset they are fewer than the machine has."""
    quota = [share for share in map(_quota, ("cpu.max", "cpu/cpu.cfs_quota_us cpu/cpu.cfs_period_us")) if share >= 0]
    return max(1, min(len(_mine()) or os.cpu_count() or 1, *map(int, quota), MOST))


def _quota(files: str) -> float:
    """Cores a container may keep busy, from cgroup version 2 or 1; -1 where there is no limit."""
    with suppress(OSError, ValueError):  # ValueError: "max"
        quota, period = map(float, " ".join((CGROUP / name).read_text() for name in files.split()).split())
        return quota / period if quota > 0 else -1
    return -1


def _mine() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _others_worked() -> float | None:
    """Seconds this process's cores have worked for others since the system started; None where that is not known."""
    mine, ticks = {f"cpu{number}" for number in _mine()}, 0
    try:
        for line in STAT.read_text().splitlines():
            name, *counts = line.split()
            if name in mine:  # user, nice, system, idle, waiting for a disk, two of interrupts, another machine
                ticks += sum(map(int, counts[:3])) + sum(map(int, counts[5:8]))
        return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()
    except (OSError, ValueError):
        return None


def idle_cores(longest: float = RECENT) -> float:
    """Cores that no other process keeps busy: on average since the last look, if that is at most ``longest`` seconds
    ago, else for a moment from now."""
    global _seen
    worked = _others_worked()
    if worked is None:
        return cores()
    if _seen is None or not SHORT <= time.monotonic() - _seen[0] <= longest:
        _seen = time.monotonic(), worked
        time.sleep(SHORT)
        worked = _others_worked() or worked
    (before, then), _seen = _seen, (time.monotonic(), worked)
    return min(cores(), len(_mine()) - (worked - then) / (_seen[0] - before))


def _set_by_user(count: int) -> bool:
    """torch itself takes as many threads as this process has cores, or, with MKL, as many as those are without
    hyper-threads."""
    with suppress(OSError):
        siblings = {(CPUS / f"cpu{number}" / "topology" / "thread_siblings_list").read_text() for number in _mine()}
        return "OMP_NUM_THREADS" in os.environ or count not in (len(_mine()), len(siblings))
    return "OMP_NUM_THREADS" in os.environ or count != len(_mine())


class Threads:
    """``asked``: threads of the run. None: those the user gave torch (OMP_NUM_THREADS, ``torch.set_num_threads``), else
    as many as there are idle cores. ``count``: how many there are. ``free``: whether that follows the load."""

    def __init__(self, asked: int | None, *, follows: bool = True):
        """``follows``: False where the work is done elsewhere, and torch's number will do."""
        if asked is not None and whole("threads", asked, 1) > MOST:
            raise LeanconvError(f"threads={asked!r} must be a whole number from 1 to {MOST}.")
        self.asked, self._follows = asked, follows
        self.count, self.free, self._most = 1, False, 1
        self._ours = False  # whether the number is for us to choose

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside the block torch has these; afterwards as many as before."""
        import torch

        before = torch.get_num_threads()
        self._most = min(before, cores())
        self.free = self.asked is None and self._follows and not _set_by_user(before)
        self._ours |= self.free
        try:
            self._set(self.asked or (self._fitting(RECENT) if self.free else before))
            yield
        finally:
            torch.set_num_threads(before)

    def follow(self) -> None:
        """Another number where the load is another than it was: between layers."""
        if self.free and _seen is not None and time.monotonic() - _seen[0] >= SHORT:
            self._set(self._fitting(float("inf")))

    def keep(self, count: int) -> None:
        """From now on ``count``, whatever the load."""
        self.asked, self.free = min(count, cores()), False
        self._set(self.asked)

    def suit(self, product: float) -> None:
        """One thread from now on where the largest product of a run has few multiply-adds."""
        if self._ours and product < SMALL:
            self.keep(1)

    def _fitting(self, longest: float) -> int:
        return max(1, min(self._most, round(idle_cores(longest))))

    def _set(self, count: int) -> None:
        import torch

        self.count = count
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)


def spin_little() -> None:
    """Threads that wait for others soon let go of their cores. For a command, at its start: libgomp reads this while
    torch is imported."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
