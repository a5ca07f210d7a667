"""Threads of a run, and what a run says before it begins its long work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import leanconv
from leanconv.system import threads
from tests.support.equality import assert_equal
from tests.support.networks import plain_network
from tests.support.runs import accelerate
from tests.support.workdirs import killed_after, run


class Counting(nn.Sequential):
    """Notes how many threads it runs with."""

    def __init__(self) -> None:
        super().__init__(*plain_network())
        self.seen: set[int] = seen_threads

    def forward(self, images: Tensor) -> Tensor:
        self.seen.add(torch.get_num_threads())
        return super().forward(images)

    def __deepcopy__(self, memo: dict[int, object]) -> Counting:
        return Counting().eval()


seen_threads: set[int] = set()


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """torch has its own number, three, and the load leaves so many cores."""
    monkeypatch.setattr(threads, "_set_by_user", lambda count: False)
    monkeypatch.setattr(threads, "cores", lambda: 3)
    monkeypatch.setattr(threads, "SMALL", 0)
    torch.set_num_threads(3)
    yield lambda idle: monkeypatch.setattr(threads, "idle_cores", lambda longest=0: idle)
    torch.set_num_threads(1)


def test_a_run_computes_with_the_threads_asked_for(pictures: Tensor) -> None:
    seen_threads.clear()
    accelerate(Counting().eval(), pictures, threads=3)
    assert list(seen_threads) == [3]
    assert torch.get_num_threads() == 1


def test_an_analysis_and_all_its_stages_do(pictures: Tensor) -> None:
    seen_threads.clear()
    with leanconv.analyze(Counting().eval(), pictures, samples=2000, progress=False, threads=2) as analysis:
        analysis.apply(analysis.plan(2.0))
    assert list(seen_threads) == [2]
    assert torch.get_num_threads() == 1


def test_a_run_that_goes_on_has_the_threads_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: Callable[[int], None]
) -> None:
    def state() -> int:
        return json.loads((tmp_path / "leanconv-work.json").read_text())["threads"]

    free(2)
    killed_after(1, monkeypatch, tmp_path)
    assert state() == 2
    free(1)
    whole = run(tmp_path)
    assert state() == 2
    assert_equal(whole, run(None, threads=2))
    run(tmp_path, threads=1, speedup=1.5)  # the user's word counts, and is no other run
    assert state() == 1


def test_a_run_without_a_workdir_takes_what_is_idle_now(pictures: Tensor, free: Callable[[int], None]) -> None:
    free(2)
    seen_threads.clear()
    accelerate(Counting().eval(), pictures)
    assert list(seen_threads) == [2]
    assert torch.get_num_threads() == 3


def test_a_small_run_goes_on_with_one_thread(
    pictures: Tensor, free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    free(2)
    monkeypatch.setattr(threads, "SMALL", 1e12)
    assert_equal(accelerate(plain_network(), pictures), accelerate(plain_network(), pictures, threads=1))
    seen, put = [], torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda count: (seen.append(count), put(count)))
    accelerate(plain_network(), pictures)
    assert seen == [2, 1, 3, 1, 3, 1, 3]  # known after the network was looked at; put back after each stage
    seen.clear()
    accelerate(plain_network(), pictures, threads=2)
    assert seen == [2, 3] * 3


def test_the_time_is_said_before_the_long_work(
    network: nn.Module, pictures: Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerate(network, pictures, progress=True, threads=2)
    first = capsys.readouterr().err.splitlines()[0]
    pattern = r"leanconv: about \d+ s on 2 threads: [\d.e-]+ GMACs an image, \d+ images, \d+ layers"
    assert re.fullmatch(pattern, first), first


def test_the_time_is_at_least_that_where_more_is_measured(
    network: nn.Module, pictures: Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerate(network, pictures, progress=True, refine=leanconv.Distill(steps=1))
    assert capsys.readouterr().err.startswith("leanconv: at least ")


def test_nothing_is_said_of_the_time_where_a_workdir_knows_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, progress=True)
    assert " on 1 thread: " in capsys.readouterr().err
    run(tmp_path, progress=True, speedup=1.5)
    assert " on 1 thread: " not in capsys.readouterr().err


def test_the_estimate_changes_no_bit(network: nn.Module, pictures: Tensor) -> None:
    assert_equal(accelerate(network, pictures), accelerate(network, pictures, progress=True))
