"""Times of single layers: small networks of one layer's form with its activation, at the layer's own input size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from leanconv.forms import Choice
from leanconv.forms.replace import change_of, factor_modules
from leanconv.network.activations import build_activation
from leanconv.network.layers.geometry import Cost
from leanconv.network.layers.kinds import KINDS
from leanconv.network.layers.modules import dense_modules
from leanconv.network.sites import Site
from leanconv.ranks.latency.cache import Cache
from leanconv.ranks.latency.grid import LayerTimes
from leanconv.ranks.latency.onnx_writer import prepared
from leanconv.runtimes.bench.machine import machine, threads_set
from leanconv.runtimes.bench.measure import interleaved
from leanconv.runtimes.runners import Conditions
from leanconv.runtimes.target import Target

# Forms measured in turns at a time: all of them stay in memory.
TOGETHER = 40
# Seconds that so many are measured for, after a warm-up of at most as long.
SECONDS = 1.5
# Whatever disturbs a measurement makes it longer, never shorter: the true time is near the shortest ones. The very
# shortest of a few may have met the caches of its like, so not that.
QUANTILE = 0.2


def typical(times: Iterable[float]) -> float:
    """Milliseconds, from seconds."""
    return 1e3 * float(np.quantile(list(times), QUANTILE))


def finishing(device: torch.device) -> Callable[[], None]:
    """What waits for a device."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


def conditions_of(target: Target) -> Conditions:
    assert target.device is not None
    return Conditions(device=torch.device(target.device), threads=target.threads, dtype=target.dtype)


@dataclass
class Stopwatch:
    """Times layers on ``target`` and keeps the times; what is known is not measured again."""

    target: Target
    cache: Cache

    @classmethod
    def of(cls, target: Target) -> Stopwatch:
        about = machine(conditions_of(target).device, target.threads)
        facts = {key: value for key, value in about.items() if key not in ("load", "python")}
        return cls(target, Cache.opened({**facts, "target": target.to_json()}))

    def measure(self, wanted: Iterable[tuple[Site, list[Choice]]], step: Callable[[], None] = lambda: None) -> None:
        """Time these forms, and the layers as they are; ``step`` is called for every site. Sites that are alike are
        measured once."""
        for site, choices in wanted:
            known = self.cache.times(key_of(site))
            new = [choice for choice in dict.fromkeys(choices) if choice not in known]
            for start in range(0, len(new), TOGETHER):
                known |= self._measured(site, new[start : start + TOGETHER], known.get(None))
            if None not in known:  # there is no other form to time
                known |= self._measured(site, [], None)
            if new:
                self.cache.keep()
            step()

    def scale(self, sites: Iterable[Site], other: Callable[[], Any]) -> float:
        """Milliseconds of ``other`` on a machine as fast as when the layers of ``sites`` were first timed; they are
        timed along with it."""
        conditions = conditions_of(self.target)
        layers = {key_of(site): site for site in sites}
        with threads_set(conditions.threads):
            calls = {key: self._call(site, None) for key, site in layers.items()}
            times = interleaved(calls | {"": other}, seconds=SECONDS, finish=finishing(conditions.device)).times
        known = sum(self.cache.times(key)[None] for key in layers)
        return typical(times[""]) * known / sum(typical(times[key]) for key in layers)

    def times(self, site: Site) -> LayerTimes:
        return LayerTimes(site.geometry, self.cache.times(key_of(site)))

    def _measured(self, site: Site, choices: list[Choice], before: float | None) -> dict[Choice | None, float]:
        """The layer as it is goes along every time. ``before``: its time when others were measured; what the machine is
        slower or faster now is taken out by it."""
        conditions = conditions_of(self.target)
        forms: list[Choice | None] = [None, *choices]
        with threads_set(conditions.threads):
            calls = {str(number): self._call(site, form) for number, form in enumerate(forms)}
            rounds = interleaved(calls, seconds=SECONDS, finish=finishing(conditions.device))
        found = {form: typical(rounds.times[str(number)]) for number, form in enumerate(forms)}
        if before is None:
            return found
        scale = before / found.pop(None)
        return {form: scale * ms for form, ms in found.items()}

    def _call(self, site: Site, form: Choice | None) -> Callable[[], Any]:
        example = example_of(site, self.target.batch)
        return prepared(form_network(site, form), example, self.target.runtime, conditions_of(self.target))


def key_of(site: Site) -> str:
    """All that the time of a site's forms depends on."""
    return json.dumps([site.geometry.to_json(), site.in_size, site.activation.name], sort_keys=True)


def repeats(site: Site) -> float:
    """How often the layer runs for one image."""
    return site.cost.dense / Cost.of(site.geometry, site.in_size, site.out_size).dense


def example_of(site: Site, batch: int) -> Tensor:
    shape = KINDS[site.geometry.kind].input_shape(site.geometry, site.in_size, batch)
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def form_network(site: Site, choice: Choice | None) -> nn.Sequential:
    """One layer, whole or in factors, and its activation; random weights."""
    if choice is None:
        layers = dense_modules(site.geometry)
    else:
        layers = factor_modules(change_of(site, choice))
    behind = build_activation(site.activation)
    return nn.Sequential(*layers, *([] if behind is None else [behind])).eval()
