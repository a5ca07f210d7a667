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
from leanconv.pipeline.solve_layers import Solving
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
    fit, run = Solving._fit, Solving.run

    def kept(self: Solving, name: str, target: Responses, given: Responses) -> Fit:
        probe = self.probes[name]
        y = probe.responses(given.y) if probe.halfway else given.y.clone()
        fitted[name] = Responses(y, None if given.addend is None else given.addend.clone())
        return fit(self, name, target, given)

    def twice(self: Solving) -> Any:
        found = run(self)
        whole = [replace(probe, halfway=False) for probe in self.probes.values()]
        seen = self.engine.responses(self.engine.accelerated, whole, "a second pass")
        again.update({name: seen.get(name) for name in self.probes})
        return found

    monkeypatch.setattr(Solving, "_fit", kept)
    monkeypatch.setattr(Solving, "run", twice)
    leanconv.accelerate(build().double(), smooth_images(32).double(), 2, samples=2000, progress=False, **arguments)
    assert again.keys() == fitted.keys()
    assert len(again) > 1
    assert any(given.addend is not None for given in again.values()) == (build is residual)
    for name, given in again.items():
        torch.testing.assert_close(given.y, fitted[name].y)
        torch.testing.assert_close(given.addend, fitted[name].addend)
