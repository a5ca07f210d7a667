"""Gradients of the output at the layers of small networks, and the exact numbers they estimate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import Batch
from leanconv.calibrate.gradients import Gradients, output_gradients
from leanconv.calibrate.probes import Probe, Responses
from leanconv.network.fold import folded
from leanconv.network.layers.kinds import KINDS
from leanconv.network.survey import survey

CPU = torch.device("cpu")


def probes_of(model: nn.Module, images: Any) -> dict[str, Probe]:
    sites = survey(model, images, layers="all").sites
    return {site.name: Probe(site, *folded(model, site, torch.float64)) for site in sites}


def respond(probe: Probe, x: Tensor) -> Tensor:
    """N x positions x d, by the folded filters."""
    kind = KINDS[probe.site.geometry.kind]
    weight = probe.weight if kind.over_a_map else probe.weight.flatten(1)
    return kind.rows(kind.compute(x, weight, probe.bias, probe.site.geometry))


def responses_of(model: nn.Module, images: Any, probe: Probe) -> Tensor:
    """At every position: rows x d."""
    seen: list[Tensor] = []
    layer = model.get_submodule(probe.site.name)
    hook = layer.register_forward_hook(lambda _, inputs, __: seen.append(respond(probe, inputs[0]).flatten(0, 1)))
    with torch.no_grad():
        model(images)
    hook.remove()
    return torch.cat(seen)


def measured(
    model: nn.Module, images: Tensor, *, draws: int = 1, cut: tuple[int, ...] | None = None, seed: int = 0
) -> dict[str, Gradients]:
    """Of the ``images``, each with so many ``draws``. ``cut``: sizes of the batches."""
    many = images.repeat(draws, 1, 1, 1)
    batches, first = [], 0
    for part in many.split(list(cut) if cut else len(many)):
        batches.append(Batch(first, len(part), (part,)))
        first += len(part)
    probes = probes_of(model, images)
    return output_gradients(
        model,
        batches,
        probes,
        lambda name: Responses(responses_of(model, images, probes[name]), None),
        device=CPU,
        seed=seed,
    )
