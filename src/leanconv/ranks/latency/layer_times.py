"""Times of single layers: small networks of one layer's form with its activation, at the layer's own input size.

Times are kept in one file for every machine, its libraries and a target, whatever the network. ONNX files of the small
networks are written here: torch's exporter takes a second for each of hundreds.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from leanconv.errors import warn
from leanconv.forms import FORMS, Choice
from leanconv.forms.replace import change_of, factor_modules
from leanconv.network import activations
from leanconv.network.activations import build_activation
from leanconv.network.layers.geometry import Cost
from leanconv.network.layers.kinds import KINDS, REPLACEABLE, kind_of
from leanconv.network.layers.modules import dense_modules
from leanconv.network.sites import Site
from leanconv.ranks.latency.choose import Times
from leanconv.runtimes.bench.machine import machine, threads_set
from leanconv.runtimes.bench.measure import interleaved, wait_for
from leanconv.runtimes.libraries import load
from leanconv.runtimes.runners import RUNTIMES, Conditions
from leanconv.runtimes.runners.onnx import OnnxRunner
from leanconv.runtimes.target import Target
from leanconv.system.atomic_files import write_whole

# Forms measured in turns at a time: all of them stay in memory.
TOGETHER = 40
# Seconds of one such measurement, after a warm-up of at most the same time.
SECONDS = 1.5
# Disturbances make a measurement longer, never shorter: the true time is near the shortest ones. The very shortest may
# have profited from caches, so it is not taken.
QUANTILE = 0.2
# Of files with times: their format, and the name of a layer as it is.
FORMAT, VERSION, DENSE = "leanconv-latency", 1, "dense"
# Of ONNX files.
OPSET, IR = 18, 9


def typical(times: Iterable[float]) -> float:
    """Milliseconds, from seconds."""
    return 1e3 * float(np.quantile(list(times), QUANTILE))


def conditions_of(target: Target) -> Conditions:
    assert target.device is not None
    return Conditions(device=torch.device(target.device), threads=target.threads, dtype=target.dtype)


@dataclass
class Stopwatch:
    """Times layers on ``target`` and caches the times: nothing is measured twice."""

    target: Target
    cache: Cache

    @classmethod
    def of(cls, target: Target) -> Stopwatch:
        about = machine(conditions_of(target).device, target.threads)
        facts = {key: value for key, value in about.items() if key not in ("load", "python")}
        return cls(target, Cache.opened({**facts, "target": target.to_json()}))

    def measure(self, wanted: Iterable[tuple[Site, list[Choice]]], step: Callable[[], None] = lambda: None) -> None:
        """Time these forms, and the whole layers; ``step`` is called for every site. Equal sites are measured once."""
        for site, choices in wanted:
            known = self.times(site)
            new = [choice for choice in dict.fromkeys(choices) if choice not in known]
            for start in range(0, len(new), TOGETHER):
                known |= self._measured(site, new[start : start + TOGETHER], known.get(None))
            if None not in known:  # there is no other form to time
                known |= self._measured(site, [], None)
            if new:
                self.cache.keep()
            step()

    def scale(self, sites: Iterable[Site], other: Callable[[], Any]) -> float:
        """Milliseconds of ``other`` on a machine as fast as when the layers of ``sites`` were first timed: these are
        timed again with it."""
        conditions = conditions_of(self.target)
        layers = {key_of(site): site for site in sites}
        with threads_set(conditions.threads):
            calls = {key: self._call(site, None) for key, site in layers.items()}
            times = interleaved(calls | {"": other}, seconds=SECONDS, finish=wait_for(conditions.device)).times
        known = sum(self.cache.times(key)[None] for key in layers)
        return typical(times[""]) * known / sum(typical(times[key]) for key in layers)

    def times(self, site: Site) -> Times:
        return self.cache.times(key_of(site))

    def _measured(self, site: Site, choices: list[Choice], before: float | None) -> Times:
        """The whole layer is always timed with the forms. ``before``: its first time; times are scaled to it, as the
        machine may be slower or faster now."""
        conditions = conditions_of(self.target)
        forms: list[Choice | None] = [None, *choices]
        with threads_set(conditions.threads):
            calls = {str(number): self._call(site, form) for number, form in enumerate(forms)}
            rounds = interleaved(calls, seconds=SECONDS, finish=wait_for(conditions.device))
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


def folder() -> Path:
    """LEANCONV_CACHE, or leanconv's place in the user's cache folder."""
    own = os.environ.get("LEANCONV_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leanconv"


@dataclass
class Cache:
    """What was timed under ``facts`` (machine, versions, target), by layer and form."""

    path: Path
    facts: dict[str, Any]
    layers: dict[str, Times] = field(default_factory=dict)

    @classmethod
    def opened(cls, facts: dict[str, Any]) -> Cache:
        """The file of these facts. One that cannot be read is ignored with a warning, and replaced later."""
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        cache = cls(folder() / f"latency-{digest}.json", facts)
        try:
            data = json.loads(cache.path.read_text(encoding="utf-8"))
            if (data["format"], data["version"], data["facts"]) != (FORMAT, VERSION, facts):
                raise ValueError("of another version")
            cache.layers = {layer: _read(forms) for layer, forms in data["layers"].items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            warn(
                f"the times kept in {str(cache.path)!r} cannot be read ({type(error).__name__}); they are taken again."
            )
        return cache

    def times(self, layer: str) -> Times:
        return self.layers.setdefault(layer, {})

    def keep(self) -> None:
        """Write the file, whole or not at all; where that fails the run continues."""
        layers = {layer: {_name(choice): ms for choice, ms in times.items()} for layer, times in self.layers.items()}
        data = {"format": FORMAT, "version": VERSION, "facts": self.facts, "layers": layers}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(data) + "\n")
        except OSError as error:
            warn(f"the times cannot be kept in {str(self.path)!r} ({error.strerror}); set LEANCONV_CACHE to a folder.")


def _name(choice: Choice | None) -> str:
    return DENSE if choice is None else " ".join([choice.form.name, *map(str, choice.ranks)])


def _read(forms: dict[str, float]) -> Times:
    found: Times = {}
    for name, ms in forms.items():
        form, *ranks = name.split(" ")
        if not (isinstance(ms, float) and ms > 0 and (form == DENSE or form in FORMS)):
            raise ValueError(name)
        found[None if form == DENSE else Choice(FORMS[form], tuple(map(int, ranks)))] = ms
    return found


def prepared(network: nn.Sequential, example: Tensor, runtime: str, conditions: Conditions) -> Callable[[], Any]:
    """A call of ``network``, a row of layers, in ``runtime``."""
    runner = RUNTIMES[runtime]
    if isinstance(runner, OnnxRunner) and (model := written(network, example)) is not None:
        return runner.open_onnx(model, example, conditions)
    return runner.prepare(network, example, conditions)


def written(network: nn.Sequential, example: Tensor) -> bytes | None:
    """``network`` as the bytes of an ONNX file; None where a layer has no simple ONNX operation."""
    onnx = load("onnx", "onnx")
    helper, from_array = onnx.helper, onnx.numpy_helper.from_array
    nodes, weights, here = [], [], "images"
    for number, module in enumerate(network):
        given, here = here, f"output{number}"
        if type(module) in activations.ONNX:
            nodes.append(helper.make_node(activations.ONNX[type(module)], [given], [here]))
            continue
        settings = kind_of(module).onnx(module, example) if type(module) in REPLACEABLE else None
        if settings is None:
            return None
        operation, attributes = settings
        names = [f"{name}{number}" for name, _ in module.named_parameters()]
        nodes.append(helper.make_node(operation, [given, *names], [here], **attributes))
        weights += [
            from_array(value.detach().cpu().float().contiguous().numpy(), name)
            for name, value in zip(names, module.parameters(), strict=True)
        ]
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "layers",
        [helper.make_tensor_value_info("images", kind, list(example.shape))],
        [helper.make_tensor_value_info(here, kind, None)],
        weights,
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
    return bytes(made.SerializeToString())
