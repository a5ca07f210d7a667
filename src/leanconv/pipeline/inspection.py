"""What a network is made of, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from leanconv.calibrate.batches import take
from leanconv.calibrate.detections import Detections
from leanconv.calibrate.observe import observe
from leanconv.calibrate.positions import Positions
from leanconv.calibrate.probes import Probe, Responses
from leanconv.errors import LeanconvError
from leanconv.forms.fit import site_activation
from leanconv.network.fold import folded
from leanconv.network.reasons import by_reason
from leanconv.network.sites import Survey, linear_fits
from leanconv.network.torchvision_detectors import kind_of, seen_as_tensors
from leanconv.network.user_model import copied
from leanconv.pipeline.prepare import survey_on
from leanconv.system.text_table import table

# Responses looked at a layer to measure sparsity; 20,000 x d numbers.
SAMPLES = 20_000


@dataclass(frozen=True)
class Inspection:
    """The layers of one observed run and, where images were given, the share of zeros behind each activation."""

    survey: Survey
    zeros: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        total = self.survey.macs
        activations = {site.name: site.activation.name for site in self.survey.sites}
        return {
            "macs": total,
            "parameters": sum(layer.parameters for layer in self.survey.layers),
            "layers": [
                {
                    **asdict(layer),
                    "share": layer.macs / total,
                    "activation": activations.get(layer.name),
                    "sparsity": self.zeros.get(layer.name),
                    "left_alone": self.survey.skipped.get(layer.name),
                }
                for layer in self.survey.layers
            ],
        }

    def __str__(self) -> str:
        total = self.survey.macs
        activations = {site.name: site.activation.name for site in self.survey.sites}
        rows = [
            [
                layer.name,
                layer.type,
                " x ".join(str(side) for side in layer.kernel),
                f"{layer.in_channels} -> {layer.out_channels}",
                " x ".join(str(side) for side in layer.out_size),
                f"{layer.macs / 1e6:.1f}",
                f"{100 * layer.macs / total:.1f}",
                activations.get(layer.name, "-"),
                f"{100 * self.zeros[layer.name]:.1f}%" if layer.name in self.zeros else "-",
            ]
            for layer in self.survey.layers
        ]
        heads = ["layer", "type", "filter", "channels", "output", "MMACs", "MACs %", "activation", "sparsity"]
        lines = [table(heads, rows, left=2)]
        lines += [f"cannot be accelerated: {line}" for line in by_reason(self.survey.skipped)]
        lines += [f"fitted linearly: {line}" for line in by_reason(linear_fits(self.survey.sites))]
        lines.append(f"{total / 1e6:.1f} million multiply-accumulates an image in {len(rows)} layers")
        if not self.zeros:
            lines.append("sparsity is measured on pictures: give --images PATH")
        return "\n".join(lines)


def inspect_network(
    model: nn.Module,
    batches: Sequence[Any] | None,
    *,
    shape: tuple[int, ...],
    layers: Literal["conv", "all"] = "conv",
    device: torch.device | str = "cpu",
) -> Inspection:
    """Run a copy of ``model`` on the first image (or noise of ``shape``) and count; batches as for ``accelerate``."""
    place = torch.device(device)
    network = copied(model).eval().to(place)
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    real: Mapping[str, int] = {}
    if kind_of(network) is not None:
        seen = Detections(network, batches or [noise], place)
        images = take(seen)
        real = seen.real(layers)
        seen_as_tensors(network)
    else:
        images = take(batches or [noise])
    found = survey_on(network, images.sample(1), place, layers, real)
    if not found.layers:
        raise LeanconvError("the network ran no convolution on this input; there is nothing to show.")
    zeros: dict[str, float] = {}
    if batches:
        dtype = next(network.parameters()).dtype
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        probes = [Probe(site, *folded(network, site, dtype)) for site in found.sites]
        active = {site.name: site for site in found.sites if site.activation.name != "identity"}
        counts: dict[str, list[tuple[int, int]]] = {name: [] for name in active}

        def count(name: str, first: int, seen: Responses) -> None:
            if name in active:
                behind = site_activation(active[name], seen.y)(seen.y)
                counts[name].append((int((behind == 0).sum()), behind.numel()))

        per_image = max(1, -(-SAMPLES // images.images))
        positions = Positions(per_image=per_image, images=images.images, seed=0, device=place)
        observe(network, images, probes, positions=positions, device=place, take=count)
        zeros = {name: sum(z for z, _ in seen) / sum(n for _, n in seen) for name, seen in counts.items()}
    return Inspection(found, zeros)
