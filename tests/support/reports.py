"""A saved folder and invented facts that the tests of the report share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import leanconv
from leanconv.config import Options
from leanconv.evaluation.paired import compare
from leanconv.forms import FORMS
from leanconv.forms.schemes import as_scheme
from leanconv.network.layers.geometry import Cost, Geometry
from leanconv.ranks import Candidate, KeptSpectra
from leanconv.ranks.candidates import Energies
from leanconv.report.facts import Facts, LayerFacts
from leanconv.runtimes.bench.comparison import bench
from leanconv.storage.records import write_record
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images

NASTY = "<script>alert(1)</script>&<b>'\"x"


@pytest.fixture(scope="module")
def result() -> leanconv.Accelerated:
    """By energy, as the plans of the page: 3d in every layer."""
    return leanconv.accelerate(plain_network(), smooth_images(), 2.0, ranks="energy", samples=500, progress=False)


@pytest.fixture
def folder(result: leanconv.Accelerated, tmp_path: Path) -> Path:
    return result.save(tmp_path / "saved")


def record_all(folder: Path, result: leanconv.Accelerated) -> None:
    """What bench and evaluate --record leave in a folder."""
    networks = {"original": plain_network(), "saved": result.model}
    found = bench(networks, shape=(3, 16, 16), seconds=0.02, layers=True, progress=False, threads=1)
    write_record(folder, "bench", found.to_json())
    images, labels = smooth_images(40, seed=1), torch.arange(40) % 10
    with torch.no_grad():
        comparison = compare(networks["original"](images), result.model(images), labels, original="a", other="b")
    write_record(folder, "evaluation", {**comparison.to_json(), "data": "held-out", "views": 1, "unreadable": []})


def many_layers(count: int, width: int) -> Facts:
    """Facts of a network nobody would run in a test."""
    geometry = Geometry(kind="conv2d", in_channels=width, out_channels=width, kernel=(3, 3), padding=(1, 1))
    cost = Cost.of(geometry, (14, 14), (14, 14))
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(3 * width, generator=generator, dtype=torch.float64).sort(descending=True).values.tolist()
    spectra = {"channel": Energies(values[:width]), "spatial": Energies(values)}
    names = [f"features.stage.{i}.conv" for i in range(count)]
    kept = KeptSpectra(
        scheme=as_scheme("3d"),
        candidates=tuple(Candidate(name=name, geometry=geometry, cost=cost, spectra=spectra) for name in names),
        pairs=[],
        fixed=0,
        counted=dict.fromkeys(names, cost.dense),
    )
    layers = [
        LayerFacts(
            name=name,
            macs_before=cost.dense,
            macs_after=FORMS["3d"].macs(cost, (5, 5)),
            scheme="3d",
            ranks=(5, 5),
            limits=(3 * width, width),
            kinds=("spatial", "channel"),
            energy=0.9,
            filters=0.8,
            error=0.1,
        )
        for name in names
    ]
    return Facts(
        folder="many",
        network="many",
        original="MODEL",
        source="many",
        original_options=(),
        macs_before=count * cost.dense,
        macs_after=count * FORMS["3d"].macs(cost, (5, 5)),
        parameters_before=2,
        parameters_after=1,
        images=1,
        layers=layers,
        skipped={},
        options=Options.check().to_json(),
        repeat="",
        another="",
        typed=False,
        versions={},
        seconds={},
        tuned=None,
        times=None,
        accuracy=None,
        spectra=kept,
    )


def plan_labels(kept: KeptSpectra, speedup: float) -> list[str]:
    """What the slider of a page shows of each candidate: the form and its ranks."""
    plan, pairs = kept.select(speedup)
    shown = dict.fromkeys((one.name for one in kept.candidates), "not replaced")
    shown |= {taker: f"merged {plan[giver].ranks[-1]}" for giver, taker in pairs}
    return list(
        (shown | {name: f"{one.form.name} {' × '.join(map(str, one.ranks))}" for name, one in plan.items()}).values()
    )
