"""How many threads a run computes with: by the load, by the user's word, and what is put back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from leanconv.errors import LeanconvError
from leanconv.system import threads
from leanconv.system.threads import Threads, cores, idle_cores


class Machine:
    """Cores 0 to 3, of which this process may use two or as many as it is told; time passes while it sleeps."""

    def __init__(self, folder: Path):
        self.stat, self.now, self.own = folder / "stat", 100.0, 3.0
        self.worked = [0.0, 0.0, 0.0, 0.0]  # seconds
        self.load = [0.0, 0.0, 0.0, 0.0]  # how busy each core is with other processes
        self.threads = 0.0  # cores that this process itself keeps busy
        self.pass_time(0)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.own += seconds * self.threads
        mine = [self.threads / 2, self.threads / 2, 0, 0]
        self.worked = [
            done + seconds * (load + own) for done, load, own in zip(self.worked, self.load, mine, strict=True)
        ]
        lines = [f"cpu{core} {100 * done:.0f} 0 0 5 7 0 0 0 0 0" for core, done in enumerate(self.worked)]
        self.stat.write_text("\n".join(["cpu 9 9 9 9 9 9 9 9 9 9", *lines, "intr 4 5"]))

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.own

    sleep = pass_time


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(threads, "time", made)
    monkeypatch.setattr(threads, "STAT", made.stat)
    monkeypatch.setattr(threads, "CGROUP", tmp_path)
    monkeypatch.setattr(threads, "_mine", lambda: {0, 1})
    monkeypatch.setattr(threads, "_seen", None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return made


@pytest.fixture
def two_threads() -> object:
    """torch as it is on two cores."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("load", "idle"),
    [([0, 0, 1, 1], 2), ([1, 0, 0, 0], 1), ([1, 1, 0, 0], 0), ([0.6, 0.2, 0, 0], 1.2)],
    ids=["others are on other cores", "one", "both", "in part"],
)
def test_cores_that_others_keep_busy_are_not_idle(load: list[float], idle: float, machine: Machine) -> None:
    machine.load = load
    assert idle_cores() == pytest.approx(idle, abs=0.05)


def test_what_the_process_does_itself_is_no_load(machine: Machine) -> None:
    idle_cores()
    machine.threads, machine.load = 1.3, [0.35, 0.35, 0, 0]
    machine.pass_time(4)
    assert idle_cores() == pytest.approx(1.3, abs=0.01)


def test_a_look_at_the_load_is_short_or_takes_no_time(machine: Machine) -> None:
    idle_cores()
    machine.pass_time(2)
    before = machine.now
    idle_cores()
    assert machine.now == before  # the load of two seconds is known
    machine.pass_time(3600)
    machine.load = [1, 1, 0, 0]
    before = machine.now
    assert idle_cores() == pytest.approx(0, abs=0.01)  # not that of the last hour
    assert machine.now - before == pytest.approx(0.05)


@pytest.mark.parametrize(("load", "count"), [([0, 0.4, 0, 0], 2), ([1, 0, 0, 0], 1), ([1, 1, 0, 0], 1)])
def test_threads_are_as_many_as_idle_cores(
    load: list[float], count: int, machine: Machine, two_threads: object
) -> None:
    machine.load = load
    chosen = Threads(None)
    with chosen.held():
        assert (chosen.count, torch.get_num_threads()) == (count, count)
    assert torch.get_num_threads() == 2


def test_the_number_follows_the_load_between_layers(machine: Machine, two_threads: object) -> None:
    chosen = Threads(None)
    with chosen.held():
        counts = [chosen.count]
        for load in ([1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]):
            machine.load = load
            machine.pass_time(1)
            chosen.follow()
            counts.append(torch.get_num_threads())
        machine.load = [1, 1, 0, 0]
        chosen.follow()  # too soon to know
        assert [*counts, torch.get_num_threads()] == [2, 1, 1, 2, 2]


def test_a_number_that_is_kept_does_not_follow(machine: Machine, two_threads: object) -> None:
    chosen = Threads(None)
    machine.load = [1, 1, 0, 0]
    with chosen.held():
        chosen.keep(2)
        machine.pass_time(1)
        chosen.follow()
        assert torch.get_num_threads() == 2
    with chosen.held():  # the next stage
        assert torch.get_num_threads() == 2


def test_the_users_number_counts(machine: Machine, two_threads: object, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.load = [1, 1, 0, 0]
    with Threads(3).held():
        assert torch.get_num_threads() == 3
    with Threads(None, follows=False).held():
        assert torch.get_num_threads() == 2
    torch.set_num_threads(3)
    with Threads(None).held():
        assert torch.get_num_threads() == 3
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with Threads(None).held():
        assert torch.get_num_threads() == 2


def test_threads_are_put_back_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="broken"), Threads(2).held():
        raise RuntimeError("broken")
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("asked", [0, -1, 1.5, True, "two", 5000])
def test_other_numbers_are_refused(asked: object) -> None:
    with pytest.raises(LeanconvError, match=f"threads={asked!r} must be a whole number from 1"):
        Threads(asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
    ],
)
def test_a_containers_share_limits_the_cores(
    files: dict[str, str], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "CGROUP", tmp_path)
    monkeypatch.setattr(threads, "_mine", lambda: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores() == count


def test_where_the_load_is_not_known_torchs_number_is_taken(machine: Machine, two_threads: object) -> None:
    machine.stat.unlink()
    with Threads(None).held():
        assert torch.get_num_threads() == 2


ENVIRONMENT = """
import os, sys
if sys.argv[1] == "late": import torch
from leanconv.system.threads import spin_little
spin_little()
print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("when", "given", "spins"),
    [
        ("early", {}, "1000"),
        ("early", {"OMP_WAIT_POLICY": "active"}, "None"),
        ("early", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("late", {}, "None"),
    ],
)
def test_threads_of_a_command_soon_let_go_of_their_cores(when: str, given: dict[str, str], spins: str) -> None:
    """libgomp reads it when torch is imported; what the user has set stays."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    said = subprocess.run([sys.executable, "-c", ENVIRONMENT, when], env=environment, capture_output=True, check=True)
    assert said.stdout.decode().strip() == spins
