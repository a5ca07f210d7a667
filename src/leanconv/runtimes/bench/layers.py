"""Time of every replaced layer, before and after.

Each layer is run alone, on an input of the size and layout it had in its network. Timers inside a running network would
have to stop a GPU before and after every layer, and could not run the old and the new layer in turns: in turns, other
work on the machine slows both down alike. The caches are warmer than in the network.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.network.layers.kinds import LAYERS
from leanconv.network.layers.modules import Factored
from leanconv.network.recognise import BATCH_NORMS
from leanconv.network.sites import Survey
from leanconv.network.survey import survey
from leanconv.runtimes.bench.measure import Ratio, Timing, interleaved, paired_ratio, timing


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """One layer in both networks. MACs are of one image, times of the whole batch."""

    name: str
    macs_before: int
    macs_after: int
    before: Timing
    after: Timing
    ratio: Ratio

    @property
    def theoretical(self) -> float:
        return self.macs_before / self.macs_after

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "macs_before": self.macs_before,
            "macs_after": self.macs_after,
            "macs_ratio": self.theoretical,
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "time_ratio": vars(self.ratio),
        }


@torch.no_grad()
def layer_times(
    original: nn.Module,
    accelerated: nn.Module,
    example: Tensor,
    *,
    seconds: float,
    finish: Callable[[], None] = lambda: None,
    step: Callable[[], None] = lambda: None,
) -> list[LayerTime]:
    """Times of every layer that differs, in the order they run; ``seconds`` are for all together. Both networks are in
    eval mode, on the device of ``example``. A folded batch norm is timed with the old layer."""
    names = replaced(original, accelerated)
    old, new = (survey(network, example[:1], layers="all") for network in (original, accelerated))
    old_inputs, new_inputs = (_inputs(network, example, names) for network in (original, accelerated))
    norms = {site.name: site.batch_norm for site in old.sites}
    layers = []
    for name in (name for name in old_inputs if new_inputs.get(name)):
        norm = norms.get(name)
        before = [original.get_submodule(name)]
        if norm is not None and not isinstance(accelerated.get_submodule(norm), BATCH_NORMS):
            before.append(original.get_submodule(norm))
        calls = {
            "before": _running(before, old_inputs[name]),
            "after": _running([accelerated.get_submodule(name)], new_inputs[name]),
        }
        times = interleaved(calls, seconds=seconds / len(names), finish=finish).times
        layers.append(
            LayerTime(
                name=name,
                macs_before=_macs(old, name),
                macs_after=_macs(new, name),
                before=timing(times["before"]),
                after=timing(times["after"]),
                ratio=paired_ratio(times["before"], times["after"]),
            )
        )
        step()
    return layers


def replaced(original: nn.Module, accelerated: nn.Module) -> list[str]:
    """Paths of layers that are factors, or of another shape, in ``accelerated``."""
    others = dict(accelerated.named_modules())

    def differs(module: nn.Module, other: nn.Module | None) -> bool:
        if not isinstance(module, LAYERS):
            return False
        return isinstance(other, Factored) or (isinstance(other, LAYERS) and other.weight.shape != module.weight.shape)

    return [name for name, module in original.named_modules() if differs(module, others.get(name))]


def _macs(network: Survey, name: str) -> int:
    """Of a layer with all layers inside it."""
    return sum(layer.macs for layer in network.layers if f"{layer.name}.".startswith(f"{name}."))


# Size, strides, dtype and device of an input. Its values do not matter for time, and could fill the memory.
_Shape = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def _inputs(network: nn.Module, example: Tensor, names: list[str]) -> dict[str, list[_Shape]]:
    """Inputs of each named layer in one run, in the order of the first calls."""
    shapes: dict[str, list[_Shape]] = defaultdict(list)

    def record(name: str, module: nn.Module, inputs: Any) -> None:
        x: Tensor = inputs[0]
        shapes[name].append((x.shape, x.stride(), x.dtype, x.device))

    with ExitStack() as hooks:
        for name in names:
            hooks.enter_context(network.get_submodule(name).register_forward_pre_hook(partial(record, name)))
        network(example)
    return dict(shapes)


def _running(modules: list[nn.Module], shapes: list[_Shape]) -> Callable[[], None]:
    # 0 to 1, without the tiny numbers that some CPUs compute with much more slowly.
    inputs = [
        torch.empty_strided(size, strides, dtype=dtype, device=device).uniform_(0, 1)
        for size, strides, dtype, device in shapes
    ]

    def call() -> None:
        with torch.inference_mode():
            for x in inputs:
                for module in modules:
                    x = module(x)

    return call
