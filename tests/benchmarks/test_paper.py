"""The paper's experiments run from end to end, on a network and pictures that take seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.common import subjects
from benchmarks.common.initialise import initialise
from benchmarks.paper import run as paper
from benchmarks.peers import spatial_sgd

ROOT = Path(__file__).parents[2]


def tiny_vgg() -> nn.Module:
    """Thirteen convolutions, eight filters each."""
    layers: list[nn.Module] = []
    for number in range(13):
        layers += [nn.Conv2d(8 if number else 3, 8, 3, padding=1), nn.ReLU()]
    return initialise(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10))).eval()


@pytest.fixture(scope="module")
def subject() -> subjects.Subject:
    torch.manual_seed(0)
    images = torch.randn(24, 3, 8, 8)
    tuning = {"epochs": 1, "batch": 12, "holdout": 0.0}
    return subjects.Subject(
        name="tiny",
        title="Tiny",
        model=tiny_vgg(),
        device="cpu",
        calibration=[images],
        training=(images, torch.arange(24) % 10),
        pictures=[images],
        labels=torch.arange(24) % 10,
        error="top1",
        speedups=(2.0,),
        layer_speedups=(2,),
        group_speedups=(2,),
        tuning=tuning,
        scratch=tuning,
        supervised=tuning,
    )


@pytest.mark.parametrize("name", list(paper.TABLES))
def test_every_table_is_made_and_drawn(
    name: str, subject: subjects.Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plots = pytest.importorskip("benchmarks.paper.plots", exc_type=ImportError)
    monkeypatch.setattr(spatial_sgd.reconstruct, "__kwdefaults__", {"steps": 2, "seed": 0})
    paper.run(name, subject, tmp_path, "python -m benchmarks.paper.run")
    path = tmp_path / "tiny" / f"{name}.json"
    table = json.loads(path.read_text())
    assert all(len(row) == len(table["heads"]) for row in table["rows"])
    assert path.with_suffix(".md").read_text().count("|\n") == len(table["rows"]) + 2
    plots.draw(table, path)
    assert path.with_suffix(".png").stat().st_size > 5000


def test_tables_measured_in_parts_are_put_together(subject: subjects.Subject, tmp_path: Path) -> None:
    for part in ("a", "b"):
        paper.run("3d", subject, tmp_path / part, f"command {part}")
    parts = [tmp_path / "a", tmp_path / "b"]
    tables = [json.loads((part / "tiny" / "3d.json").read_text()) for part in parts]
    paper.merge(parts, tmp_path / "whole")
    whole = json.loads((tmp_path / "whole" / "tiny" / "3d.json").read_text())
    assert whole["rows"] == tables[0]["rows"] + tables[1]["rows"]
    assert whole["command"] == "command a, command b"
    assert (tmp_path / "whole" / "tiny" / "3d.md").read_text().startswith("`command a, command b`")


def test_the_page_names_every_table() -> None:
    page = (ROOT / "docs" / "paper.md").read_text()
    assert all(f"| `{name}` |" in page for name in paper.TABLES)
