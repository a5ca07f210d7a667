"""The ranks at other speed-ups in a report are those that Python selects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import leanconv
from leanconv import LeanconvError
from leanconv.demo import DigitsNet
from leanconv.report.facts import facts_of
from leanconv.report.plans import LARGEST, plans, speedups
from leanconv.report.render import page as page_of
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images
from tests.support.reports import many_layers, plan_labels

QUICK: dict[str, Any] = {"solver": "linear", "asymmetric": False, "samples": 400, "progress": False}


class Bottlenecks(nn.Module):
    """Residual blocks of 1 x 1, 3 x 3, 1 x 1: forms and ranks are found by the search over a price."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(32, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 1)
            )
            for _ in range(3)
        )

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return x.mean((2, 3))


class Linked(nn.Module):
    """Narrow ends with nothing behind them, whose factor the next layer can take in, as in MobileNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1)
        self.ends = nn.ModuleList(
            nn.Sequential(nn.Conv2d(24, 20, 3, padding=1), nn.Conv2d(20, 24, 1), nn.ReLU()) for _ in range(2)
        )

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for end in self.ends:
            x = end(x)
        return x.mean((2, 3))


def vgg() -> nn.Module:
    return plain_network((32, 64, 96, 96, 128))


NETWORKS = {
    "digits 3d": (DigitsNet, (4, 32, 1), {"scheme": "3d"}),
    "digits channel": (DigitsNet, (4, 32, 1), {"scheme": "channel"}),
    "residual 3d": (Bottlenecks, (8, 16, 3), {"scheme": "3d", "speedup": 1.5}),
    "residual channel": (Bottlenecks, (8, 16, 3), {"scheme": "channel", "speedup": 1.3}),
    "linked 3d": (Linked, (8, 16, 3), {"scheme": "3d"}),
    "vgg spatial": (vgg, (4, 16, 3), {"scheme": "spatial"}),
    "by hand": (plain_network, (8, 16, 3), {"scheme": "channel", "ranks": {"3": 5, "7": 6}}),
    # So few filters that ranks are coarse: the exact search takes over.
    "coarse 3d": (lambda: plain_network((6, 7, 8)), (8, 16, 3), {"scheme": "3d", "speedup": 1.7}),
}


def made(case: str) -> leanconv.Accelerated:
    make, (count, size, channels), arguments = NETWORKS[case]
    torch.manual_seed(0)
    images = smooth_images(count, size, channels)
    return leanconv.accelerate(make().eval(), images, **{"speedup": 2.0, **arguments}, **QUICK)


def data_of(text: str) -> dict[str, Any]:
    """What the scripts of a page get."""
    data: dict[str, Any] = json.loads(text.partition('id="facts">')[2].partition("</script>")[0])
    return data


@pytest.mark.parametrize("case", NETWORKS)
def test_the_plans_are_those_that_python_selects(case: str, tmp_path: Path) -> None:
    result = made(case)
    kept = result.spectra
    assert kept is not None
    data = data_of(page_of(facts_of(result.save(tmp_path / "saved"))))
    assert [name for name, _, _ in data["candidates"]] == [one.name for one in kept.candidates]
    made_plans = plans(kept, data["target"])
    assert len(made_plans) >= 5
    merged = 0
    for plan, shown in zip(made_plans, data["plans"], strict=True):
        expected = plan_labels(kept, plan.speedup)
        assert [layer.label for layer in plan.layers] == expected
        assert (shown["speedup"], [label for label, *_ in shown["layers"]]) == (plan.speedup, expected)
        assert plan.replaced == sum(not label.startswith(("not", "merged")) for label in expected)
        assert plan.speedup <= plan.before / plan.after < 1.02 * plan.speedup
        assert plan.after == kept.fixed + sum(layer.macs for layer in plan.layers)
        merged += sum(label.startswith("merged") for label in expected)
    assert (merged > 0) == case.startswith("linked")
    if result.options.ranks == "energy":  # the run is among them, with the ranks and the MACs it has
        (own,) = [plan for plan in made_plans if plan.speedup == data["target"]]
        assert [now for _, now, _ in data["candidates"]] == [layer.label for layer in own.layers]
        assert (own.before, own.after) == (result.macs_before, result.macs_after)


def test_speedups_are_few_for_large_networks_and_end_at_what_can_be_had() -> None:
    small, large = (many_layers(count, 64).spectra for count in (3, 200))
    assert small is not None
    assert large is not None
    assert len(speedups(large, 2.0)) < 12 < 30 < len(speedups(small, 2.0)) <= 41
    assert speedups(small, 2.0)[-1] <= min(LARGEST, small.reachable)
    assert {2.0, 2.03} & set(speedups(small, 2.03)) >= {2.03}
    assert all(speedup > 1 for speedup in speedups(small, 1.05))


def test_what_cannot_be_met_is_no_place_of_the_slider() -> None:
    torch.manual_seed(0)
    coarse = leanconv.accelerate(plain_network((3, 4, 4)), smooth_images(4), 1.5, scheme="channel", **QUICK).spectra
    assert coarse is not None
    refused = []
    for speedup in speedups(coarse, 1.5):
        try:
            coarse.select(speedup)
        except LeanconvError:
            refused.append(speedup)
    assert refused
    assert [plan.speedup for plan in plans(coarse, 1.5)] == [one for one in speedups(coarse, 1.5) if one not in refused]
