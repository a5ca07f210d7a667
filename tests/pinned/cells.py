"""What is pinned: a network and the arguments it is accelerated with, and a digest of what comes out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import leanconv
from tests.pinned import networks

Facts = dict[str, Any]


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums over several threads may end in other bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Cell:
    """One call of ``accelerate``."""

    network: Callable[[], nn.Module]
    arguments: dict[str, Any] = field(default_factory=dict)
    data: Callable[[], Any] = networks.images

    def run(self, **more: Any) -> leanconv.Accelerated:
        """The result, on one thread. ``more`` are arguments that are not to change it."""
        given = {"speedup": 1.8, "samples": 1000, "progress": False, **self.arguments, **more}
        with one_thread():
            return leanconv.accelerate(self.network(), self.data(), **given)


def doubled() -> nn.Module:
    return networks.plain().double()


def double_images() -> Tensor:
    return networks.images().double()


def half() -> nn.Module:
    return networks.plain().bfloat16()


def half_images() -> Tensor:
    return networks.images().bfloat16()


def many_images() -> Tensor:
    return networks.images(520, 8)


def batches() -> list[Tensor]:
    """Batches of several sizes."""
    return list(networks.images().split([20, 20, 8]))


LINEAR = {"solver": "linear", "asymmetric": False}
PLAIN_BY_HAND = {"3": (9, 7), "7": 9, "12": (9, 9)}
MERGED_BY_HAND = {"dense.0": (20, 12), "narrow.0": (14, 6), "wide.0": 14, "last.0": (20, 10)}
OWN_BY_HAND = {"shared": (9, 8), "hidden": 12, "head": 6}

CELLS = {
    "plain": Cell(networks.plain),
    "plain, channel": Cell(networks.plain, {"scheme": "channel"}),
    "plain, spatial": Cell(networks.plain, {"scheme": "spatial", "speedup": 1.5}),
    "plain, uniform ranks": Cell(networks.plain, {"ranks": "uniform"}),
    "plain, ranks by sensitivity": Cell(networks.plain, {"ranks": "sensitivity"}),
    "plain, ranks by hand": Cell(networks.plain, {"ranks": PLAIN_BY_HAND}),
    "plain, not refined": Cell(networks.plain, {"refine": "none"}),
    "plain, linear": Cell(networks.plain, {**LINEAR, "refine": "none"}),
    "plain, channel, symmetric": Cell(networks.plain, {"scheme": "channel", "asymmetric": False}),
    "plain, sweeps": Cell(networks.plain, {"scheme": leanconv.ThreeD(sweeps=2)}),
    "plain, distilled": Cell(networks.plain, {"refine": leanconv.Distill(steps=4)}),
    "plain, distilled from many images": Cell(networks.plain, {"refine": leanconv.Distill(steps=3)}, many_images),
    "plain, as many samples as it needs": Cell(networks.plain, {"samples": "auto"}),
    "plain, all layers": Cell(networks.plain, {"layers": "all", "speedup": 1.6}),
    "plain, nothing skipped, another seed": Cell(networks.plain, {"skip": [], "seed": 3}),
    "plain, in double precision": Cell(doubled, data=double_images),
    "plain, in half precision": Cell(half, data=half_images),
    "plain, little memory": Cell(networks.plain, {"memory": 100_000}),
    "plain, few samples": Cell(networks.plain, {"samples": 300}),
    "plain, a part": Cell(networks.plain, {"part": "12", "speedup": 3.0, "skip": []}),
    "residual": Cell(networks.residual),
    "residual, channel, uniform ranks": Cell(networks.residual, {"scheme": "channel", "ranks": "uniform"}),
    "residual, spatial": Cell(networks.residual, {"scheme": "spatial"}),
    "residual, ranks by sensitivity": Cell(networks.residual, {"ranks": "sensitivity", "speedup": 2.5}),
    "residual, linear, sweeps": Cell(networks.residual, {**LINEAR, "scheme": leanconv.ThreeD(sweeps=2)}),
    "residual, distilled": Cell(networks.residual, {"scheme": "spatial", "refine": leanconv.Distill(steps=3)}),
    "residual, in batches": Cell(networks.residual, {"refine": "none", "speedup": 3.0}, batches),
    "separable": Cell(networks.separable),
    "separable, channel": Cell(networks.separable, {"scheme": "channel", "speedup": 2.5}),
    "separable, spatial": Cell(networks.separable, {"scheme": "spatial", "ranks": "uniform"}),
    "separable, ranks by sensitivity": Cell(
        networks.separable, {"scheme": "channel", "ranks": "sensitivity", "speedup": 1.5}
    ),
    "separable, merged by hand": Cell(networks.separable, {"ranks": MERGED_BY_HAND}),
    "separable, linear": Cell(networks.separable, {**LINEAR, "speedup": 2.2}),
    "own": Cell(networks.own),
    "own, all layers": Cell(networks.own, {"layers": "all", "speedup": 2.2}),
    "own, all layers, linear": Cell(networks.own, {**LINEAR, "layers": "all", "refine": "none", "ranks": OWN_BY_HAND}),
    "own, channel, all layers, sensitivity": Cell(
        networks.own, {"scheme": "channel", "layers": "all", "ranks": "sensitivity"}
    ),
    "own, all layers by hand": Cell(networks.own, {"layers": "all", "ranks": OWN_BY_HAND}),
    "own, spatial": Cell(networks.own, {"scheme": "spatial"}),
    "signals": Cell(networks.one_dimension, data=networks.signals),
    "volumes": Cell(networks.three_dimensions, data=networks.volumes),
    "built by name": Cell(networks.known, {"ranks": "uniform", "speedup": 4.0, "samples": 300}, networks.few_images),
    "detector": Cell(networks.detector, {"samples": 500, "speedup": 1.5}, networks.scenes),
    "detector, its backbone": Cell(networks.detector, {"samples": 500, "part": "backbone"}, networks.scenes),
}

# Results that were saved, by the names of their folders.
FOLDERS = {
    "channel": "separable, channel",
    "3d-merged": "separable, merged by hand",
    "spatial": "residual, spatial",
    "all-linear": "own, all layers, linear",
    "sensitivity": "residual, ranks by sensitivity",
    "detector": "detector",
    "built-by-name": "built by name",
}

# These run in processes of their own (see processes.py).
KILLED = CELLS["plain"]
WORK = CELLS["plain, few samples"]
SHARED = Cell(networks.residual, {"speedup": 2.0}, lambda: list(networks.images().split(8)))


def digest(state: dict[str, Tensor]) -> str:
    """Over names, shapes, types and bytes, in the order of the names."""
    total = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def facts(result: leanconv.Accelerated) -> Facts:
    """What is kept of a result, as plain data."""
    return {
        "sha": digest(result.model.state_dict()),
        "layers": [f"{layer.name}: {layer.scheme} {layer.ranks}" for layer in result.layers],
        "speedup": result.speedup,
    }
