"""Once all layers are accelerated, solving them again would find what is there: docs/how.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import leanconv
from leanconv.calibrate.probes import Responses
from leanconv.forms.fit import Fit
from leanconv.pipeline import analysis as stages
from leanconv.pipeline import solve_layers as solving
from leanconv.pipeline.solve_layers import LayerState
from tests.support.networks import plain_network, residual
from tests.support.pictures import smooth_images


@pytest.mark.parametrize("build", [plain_network, residual])
@pytest.mark.parametrize("arguments", [{}, {"scheme": "channel"}, {"refine": "none"}])
def test_a_second_pass_over_the_layers_has_nothing_new_to_go_by(
    build: Callable[[], nn.Module], arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the network as it ends up every layer is given what it was fitted from, shortcuts included."""
    fitted: dict[str, Responses] = {}
    again: dict[str, Responses] = {}
    fit, solve = solving._fit, solving.solve_layers

    def kept(run: solving.Run, layer: LayerState, target: Responses, inputs: Responses) -> Fit:
        y = layer.probe.responses(inputs.y) if layer.probe.halfway else inputs.y.clone()
        fitted[layer.name] = Responses(y, None if inputs.addend is None else inputs.addend.clone())
        return fit(run, layer, target, inputs)

    def twice(run: solving.Run, layers: solving.Layers) -> None:
        solve(run, layers)
        whole = [replace(layer.probe, halfway=False) for layer in layers.values()]
        seen = run.streams.responses(run.streams.accelerated, whole, "a second pass")
        again.update({name: seen.get(name) for name in layers})

    monkeypatch.setattr(solving, "_fit", kept)
    monkeypatch.setattr(stages, "solve_layers", twice)
    leanconv.accelerate(build().double(), smooth_images(32).double(), 2, samples=2000, progress=False, **arguments)
    assert again.keys() == fitted.keys()
    assert len(again) > 1
    assert any(given.addend is not None for given in again.values()) == (build is residual)
    for name, given in again.items():
        torch.testing.assert_close(given.y, fitted[name].y)
        torch.testing.assert_close(given.addend, fitted[name].addend)
