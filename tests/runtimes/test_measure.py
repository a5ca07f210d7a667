"""Timing: the statistics on made-up times, the order of calls, and what is said of the machine."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from leanconv.runtimes.bench.machine import machine, threads_set
from leanconv.runtimes.bench.measure import LEAST, WINDOW, interleaved, paired_ratio, peak_bytes, settled, timing


class FakeClock:
    """Time that passes only when something is said to take it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: float, calls: list[str], name: str) -> Any:
        def call() -> None:
            calls.append(name)
            self.now += seconds

        return call


# Statistics


def test_times_that_never_vary_have_no_interval_and_no_noise() -> None:
    found = timing([0.25] * 9)
    assert (found.median, found.low, found.high, found.spread, found.noisy) == (0.25, 0.25, 0.25, 0.0, False)


def test_the_spread_is_the_interquartile_range_over_the_median() -> None:
    found = timing([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.median == 3.0
    assert found.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert found.noisy
    assert found.low >= 1.0
    assert found.high <= 5.0
    assert found.low < found.median < found.high


def test_the_interval_of_a_median_holds_the_true_one_about_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(200, 40, generator=generator) * 0.1 + 1).tolist()
    found = [timing(times) for times in drawn]
    share = sum(one.low <= 1.0 <= one.high for one in found) / len(found)
    assert 0.9 <= share <= 0.995


def test_what_slows_both_down_cancels_in_the_ratio() -> None:
    moods = [1.0, 3.0, 1.5, 2.0, 10.0, 1.2, 1.1]
    found = paired_ratio([4 * mood for mood in moods], moods)
    assert found.value == pytest.approx(4)
    assert (found.low, found.high) == pytest.approx((4, 4))
    shuffled = paired_ratio([4 * mood for mood in moods], moods[::-1][3:] + moods[::-1][:3])
    assert shuffled.low < 4 < shuffled.high


def test_the_same_times_give_the_same_interval() -> None:
    times = [1.0, 1.3, 0.9, 1.1, 1.2, 1.05]
    assert timing(times) == timing(times)


def test_falling_times_are_not_settled() -> None:
    assert not settled([8.0, 7.0, 6.0, 5.0, 4.0, 3.0])
    assert not settled([1.0] * (2 * WINDOW - 1))
    assert settled([9.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert settled([1.0, 1.0, 1.0, 1.2, 1.2, 1.2])


# Taking turns


def test_every_round_has_everyone_once_and_the_order_is_drawn() -> None:
    clock, calls = FakeClock(), []
    found = interleaved(
        {"a": clock.taking(0.01, calls, "a"), "b": clock.taking(0.02, calls, "b")}, seconds=3, clock=clock
    )
    rounds = [tuple(calls[i : i + 2]) for i in range(0, len(calls), 2)]
    assert all(sorted(one) == ["a", "b"] for one in rounds)
    both = Counter(rounds)
    assert both["a", "b"] > len(rounds) / 4
    assert both["b", "a"] > len(rounds) / 4
    assert found.times["a"] == pytest.approx([0.01] * len(found.times["a"]))
    assert found.times["b"] == pytest.approx([0.02] * len(found.times["a"]))
    assert found.settled
    assert found.warm_up == 2 * WINDOW
    assert len(rounds) == found.warm_up + len(found.times["a"])
    assert 0.03 * len(found.times["a"]) == pytest.approx(3, abs=0.04)


def test_a_slow_network_is_still_measured_a_few_times() -> None:
    clock, calls = FakeClock(), []
    found = interleaved({"slow": clock.taking(100.0, calls, "slow")}, seconds=1, clock=clock)
    assert len(found.times["slow"]) == LEAST
    assert found.warm_up == 1
    assert not found.settled


def test_what_a_call_leaves_running_is_waited_for_within_its_time() -> None:
    clock, calls = FakeClock(), []
    left = [0.0]

    def launch() -> None:
        left[0] = 0.5

    def finish() -> None:
        clock.now += left[0]
        left[0] = 0.0

    found = interleaved({"gpu": launch}, seconds=3, clock=clock, finish=finish)
    assert calls == []
    assert set(found.times["gpu"]) == {0.5}


# The machine


def test_threads_are_put_back_whatever_happens() -> None:
    before = torch.get_num_threads()
    with threads_set(before + 2) as inside:
        assert inside == torch.get_num_threads() == before + 2
    assert torch.get_num_threads() == before
    with pytest.raises(RuntimeError, match="broken"), threads_set(before + 1):
        raise RuntimeError("broken")
    assert torch.get_num_threads() == before


def test_the_machine_is_named() -> None:
    found = machine(torch.device("cpu"), 3)
    assert found["cpu"]
    assert found["threads"] == 3
    assert found["gpu"] is None
    assert found["torch"] == torch.__version__


def test_memory_on_a_cpu_is_what_is_alive_at_once() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(5):
                x = (x + 1).relu_()  # at most two of them at a time
            return x.flatten(1)

    x = torch.zeros(1, 1, 10, 10)
    assert peak_bytes(Chain(), x, None, torch.device("cpu")) == 400 + 2 * 400
    weights = nn.Sequential(nn.Linear(10, 5, bias=False))
    assert peak_bytes(weights, torch.zeros(1, 10), None, torch.device("cpu")) == 4 * (50 + 10 + 5)
