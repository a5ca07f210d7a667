"""What a call costs: times of several callables in turns, with median, interval and noise, and peak memory."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leanconv.system.process_memory import quiet_collector

# Least and most rounds measured: fewer make no interval, more hardly narrow it.
LEAST, MOST = 5, 2000
# Warm-up ends when the median of the last three rounds is no longer this much below that of the three before.
WINDOW, FALL, WARM_UP = 3, 0.05, 30
# Times are noisy where their middle half spans more than this share of the median.
NOISY = 0.1
RESAMPLES = 2000
LEVEL = 0.95
# What is counted as peak memory, by the type of the device.
MEMORY = {
    "cuda": "torch's allocator: weights, and what one call adds at its peak",
    "cpu": "tensors alive at once in torch: weights, input and activations; no workspace of the convolution library",
}


@dataclass(frozen=True)
class Rounds:
    """Seconds of every callable, round by round, and how the warm-up before them went."""

    times: dict[str, list[float]]
    warm_up: int
    settled: bool


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one call: the median with its 95 % interval, and the interquartile range over the median."""

    median: float
    low: float
    high: float
    spread: float
    rounds: int

    @property
    def noisy(self) -> bool:
        return self.spread > NOISY

    def to_json(self) -> dict[str, Any]:
        return {
            "median_ms": 1e3 * self.median,
            "low_ms": 1e3 * self.low,
            "high_ms": 1e3 * self.high,
            "spread": self.spread,
            "noisy": self.noisy,
            "rounds": self.rounds,
        }


@dataclass(frozen=True)
class Ratio:
    """How many times longer the first takes than the second, with the 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}x (95 % interval {self.low:.2f} to {self.high:.2f})"


def wait_for(device: torch.device) -> Callable[[], None]:
    """A function that returns once the device has finished its work."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


def interleaved(
    callables: Mapping[str, Callable[[], Any]],
    *,
    seconds: float,
    finish: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Rounds:
    """Call all of ``callables`` once a round, in a new random order every round, for about ``seconds``.

    Other work on the machine then slows all of them down alike, and none always finds the caches of the same other one.
    ``finish`` waits for work a call has started (on a GPU); it is called before and within every timing.
    """
    order = list(callables)
    drawing = random.Random(0)

    def one_round(times: dict[str, list[float]]) -> None:
        drawing.shuffle(order)
        for name in order:
            finish()
            started = clock()
            callables[name]()
            finish()
            times[name].append(clock() - started)

    warm: dict[str, list[float]] = {name: [] for name in callables}
    times: dict[str, list[float]] = {name: [] for name in callables}
    with quiet_collector():
        began = clock()
        rounds, still = 0, False
        # At least one round, however slow; then until settled, but no longer than the measurement itself.
        while rounds < WARM_UP and not still and (rounds == 0 or clock() - began < seconds):
            one_round(warm)
            rounds += 1
            still = all(settled(values) for values in warm.values())
        began, measured = clock(), 0
        while measured < LEAST or (measured < MOST and clock() - began < seconds):
            one_round(times)
            measured += 1
    return Rounds(times, rounds, still)


def settled(times: Sequence[float]) -> bool:
    """Whether the last times no longer fall."""
    if len(times) < 2 * WINDOW:
        return False
    before, last = np.median(times[-2 * WINDOW : -WINDOW]), np.median(times[-WINDOW:])
    return bool(last >= (1 - FALL) * before)


def timing(times: Sequence[float]) -> Timing:
    """Statistics of one callable's times. The interval is a bootstrap: percentiles of the medians of resamples."""
    values = np.asarray(times, dtype=np.float64)
    low, high = _middle(np.median(values[_draws(len(values))], axis=1))
    median = float(np.median(values))
    lower, upper = np.quantile(values, [0.25, 0.75])
    return Timing(median=median, low=low, high=high, spread=float((upper - lower) / median), rounds=len(values))


def paired_ratio(first: Sequence[float], second: Sequence[float]) -> Ratio:
    """Median of ``first`` over median of ``second``. The bootstrap draws both times of a round together, so that what
    slowed both down cancels."""
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    drawn = _draws(len(a))
    low, high = _middle(np.median(a[drawn], axis=1) / np.median(b[drawn], axis=1))
    return Ratio(float(np.median(a) / np.median(b)), low, high)


def _draws(rounds: int) -> Any:
    """RESAMPLES x rounds: which rounds each resample holds."""
    return np.random.default_rng(0).integers(rounds, size=(RESAMPLES, rounds))


def _middle(values: Any) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def peak_bytes(model: nn.Module, example: Any, call: Any, device: torch.device) -> int:
    """Peak memory of ``call``, which runs ``model`` on ``example``.

    On a GPU torch's allocator knows it. On a CPU the peak of the process says little: it never falls, it holds both
    networks, and memory freed by one call is used again by the next. What is counted there instead are the tensors
    alive at the same time, weights and input included; it is the same on every run. What a convolution borrows inside
    one call is not seen.
    """
    own = _bytes([*model.parameters(), *model.buffers()])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        # The other network lies in the same memory and is not counted.
        return own + torch.cuda.max_memory_allocated(device) - before
    own += _bytes([leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)])
    living = _Living()
    with torch.no_grad(), living:
        model(example)
    return own + living.peak


def _bytes(tensors: list[Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class _Living(TorchDispatchMode):
    """Bytes of the storages that operations have made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = _storages((args, kwargs))
        result = func(*args, **(kwargs or {}))
        for key, storage in _storages(result).items():
            # A view or an in-place result lives in the memory of what it was made from.
            if key not in inputs and key not in self._known:
                self._add(key, storage)
        return result

    def _add(self, key: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone() -> None:
            self._known.discard(key)
            self.now -= size

        weakref.finalize(storage, gone).atexit = False


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    storages = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {storage._cdata: storage for storage in storages}
