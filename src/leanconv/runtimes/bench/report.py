"""What ``bench`` returns: every figure with its unit, as a table and as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from leanconv.runtimes.bench.layers import LayerTime
from leanconv.runtimes.bench.measure import NOISY, Ratio, Timing
from leanconv.runtimes.runners import RUNTIMES
from leanconv.system.text_table import table


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """All networks on one runtime at one batch size. ``ratio``: time of the first over time of the second."""

    runtime: str
    batch: int
    times: dict[str, Timing]
    memory: dict[str, int | None]  # bytes
    ratio: Ratio | None
    warm_up: int
    settled: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "runtime": self.runtime,
            "batch": self.batch,
            "networks": {
                name: {
                    **timing.to_json(),
                    "images_per_second": self.batch / timing.median,
                    "peak_memory_bytes": self.memory[name],
                }
                for name, timing in self.times.items()
            },
            "ratio": None if self.ratio is None else vars(self.ratio),
            "warm_up_rounds": self.warm_up,
            "settled": self.settled,
        }


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Times of one or two networks, the original first."""

    networks: tuple[str, ...]
    machine: dict[str, Any]
    conditions: dict[str, Any]
    measurements: list[Measurement]
    macs: dict[str, int] | None  # of one image, convolutions and linear layers; None for detectors
    memory_kind: str
    layers: dict[int, list[LayerTime]] = field(default_factory=dict)  # by batch size
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "networks": list(self.networks),
            "machine": self.machine,
            "conditions": self.conditions,
            "macs": self.macs,
            "macs_ratio": self.macs_ratio,
            "measurements": [one.to_json() for one in self.measurements],
            "memory_kind": self.memory_kind,
            "layers": [
                {"batch": batch, **layer.to_json()} for batch, layers in self.layers.items() for layer in layers
            ],
            "notes": list(self.notes),
        }

    @property
    def macs_ratio(self) -> float | None:
        """Multiply-accumulates of the first network over those of the second."""
        if self.macs is None or len(self.networks) < 2:
            return None
        return self.macs[self.networks[0]] / self.macs[self.networks[1]]

    def __str__(self) -> str:
        rows = [
            [
                one.runtime,
                name,
                str(one.batch),
                f"{1e3 * timing.median:.2f}",
                f"{1e3 * timing.low:.2f} to {1e3 * timing.high:.2f}",
                f"{100 * timing.spread:.1f}%{' noisy' if timing.noisy else ''}",
                f"{one.batch / timing.median:.1f}",
                "-" if one.memory[name] is None else f"{(one.memory[name] or 0) / 1e6:.1f}",
            ]
            for one in self.measurements
            for name, timing in one.times.items()
        ]
        heads = ["runtime", "network", "batch", "ms", "95 % interval", "noise", "images/s", "peak MB"]
        lines = [table(heads, rows, left=2)]
        lines += [f"{one.runtime}, batch {one.batch}: {one.ratio} faster" for one in self.measurements if one.ratio]
        if self.macs_ratio is not None:
            lines.append(f"multiply-accumulates, linear layers included: {self.macs_ratio:.2f}x fewer")
        for batch, layers in self.layers.items():
            if layers:
                lines += ["", f"layer by layer, torch, batch {batch}:", *_layer_lines(layers)]
            else:
                lines.append("layer by layer: no layer of one stands in the other's place in another form")
        return "\n".join([*lines, "", *self._remarks()])

    def _remarks(self) -> list[str]:
        lines = [_machine_line(self.machine, self.conditions)]
        if any(value is not None for one in self.measurements for value in one.memory.values()):
            lines.append(f"peak MB: {self.memory_kind}")
        if any(timing.noisy for one in self.measurements for timing in one.times.values()):
            lines.append(
                f"noisy: the middle half of the times spans more than {NOISY:.0%} of the median; close what else is "
                "running, or give more --seconds"
            )
        lines += [
            f"{one.runtime}, batch {one.batch}: times were still falling after {one.warm_up} rounds of warm-up; give "
            "more --seconds"
            for one in self.measurements
            if not one.settled
        ]
        return [*lines, *self.notes]


def _layer_lines(layers: list[LayerTime]) -> list[str]:
    """A table of the layers, and their sum."""
    rows = [
        [
            layer.name,
            f"{layer.macs_before / 1e6:.2f}",
            f"{layer.macs_after / 1e6:.2f}",
            f"{layer.theoretical:.2f}x",
            f"{1e3 * layer.before.median:.3f}",
            f"{1e3 * layer.after.median:.3f}",
            f"{layer.ratio.value:.2f}x",
            f"{layer.ratio.low:.2f} to {layer.ratio.high:.2f}",
            "noisy" if layer.before.noisy or layer.after.noisy else "",
        ]
        for layer in layers
    ]
    macs = sum(layer.macs_before for layer in layers) / sum(layer.macs_after for layer in layers)
    before = 1e3 * sum(layer.before.median for layer in layers)
    after = 1e3 * sum(layer.after.median for layer in layers)
    return [
        table(["layer", "MMACs", "after", "ratio", "ms", "after", "ratio", "95 % interval", "noise"], rows),
        f"all replaced layers: {macs:.2f}x fewer multiply-accumulates, {before / after:.2f}x less time "
        f"({before:.2f} ms -> {after:.2f} ms)",
    ]


def _machine_line(machine: dict[str, Any], conditions: dict[str, Any]) -> str:
    threads = machine["threads"]
    libraries = dict.fromkeys(library for name in conditions["runtimes"] for library in RUNTIMES[name].libraries)
    parts = [
        machine["gpu"],
        f"{machine['cpu']}, {threads} thread{'' if threads == 1 else 's'} of {machine['cores']} cores",
        None if machine["load"] is None else f"load {machine['load']:.1f} before",
        f"torch {machine['torch']}",
        *(f"{library} {machine[library]}" for library in libraries if library in machine),
    ]
    layout = ", channels-last" if conditions["channels_last"] else ""
    return f"{', '.join(filter(None, parts))}; {conditions['dtype']}{layout}, {conditions['input']}"
