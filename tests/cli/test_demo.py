"""The demo in short: one epoch, two methods, one speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from leanconv import demo


def test_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "SPEEDUPS", (4.0,))
    monkeypatch.setattr(demo, "WAYS", {name: demo.WAYS[name] for name in ("Jaderberg", demo.DEFAULT)})
    monkeypatch.setattr(demo, "SAMPLES", 1000)
    found = demo.run_demo(out=tmp_path / "kept", report=tmp_path / "demo.html", epochs=2, quiet=True)
    assert found.original > 0.8
    assert found.accuracies[demo.DEFAULT][4.0] > found.original - 0.1
    assert set(found.times) == {"original", "default 4x"}
    assert found.example.options.refine == "closed-form"  # what a plain call gives is what is kept
    text = str(found)
    assert "bit-equal" in text
    assert (tmp_path / "kept" / "model.safetensors").exists()
    assert f"the page: {tmp_path / 'demo.html'}" in text
    page = (tmp_path / "demo.html").read_text()
    assert "Measured time" in page
    assert "Accuracy, top-1" in page
    json.dumps(found.to_json())


def test_digits_network_has_enough_layers() -> None:
    convolutions = [module for module in demo.DigitsNet().modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) >= 8
    pictures, labels = demo.digits()
    assert pictures.shape == (1797, 1, 32, 32)
    assert set(labels.tolist()) == set(range(10))
    assert torch.equal(demo.digits()[0], pictures)
