"""The report's slider in a real browser: it chooses the ranks that Python chooses, and refuses what Python refuses."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import leanconv
from leanconv import LeanconvError
from leanconv.demo import DigitsNet
from leanconv.network.layers.geometry import Cost, Geometry, Scheme
from leanconv.ranks import Candidate, KeptSpectra
from leanconv.ranks.candidates import Energies
from leanconv.report import write_report
from tests.conftest import plain_network, smooth_images
from tests.report import test_report_page as browser
from tests.report.test_report_page import Opened

pytestmark = browser.pytestmark

# Fixtures, which pytest looks for by name in this file.
chromium, result, opened, page = browser.chromium, browser.result, browser.opened, browser.page

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


def ranks_in(page: Any) -> dict[str, tuple[str, list[int]]]:
    rows = page.eval_on_selector_all(
        "#what-body tr", "(rows) => rows.map((row) => [row.dataset.layer, row.dataset.scheme, row.dataset.ranks])"
    )
    return {name: (scheme, [int(rank) for rank in ranks.split(",")]) for name, scheme, ranks in rows if scheme}


def ask(page: Any, speedup: float) -> dict[str, tuple[str, list[int]]] | None:
    page.fill("#what-number", repr(speedup))
    page.wait_for_function(
        "(asked) => document.getElementById('what-body').dataset.speedup === asked", arg=f"{speedup:g}"
    )
    return ranks_in(page) if page.locator("#what-body").is_visible() else None


def chosen(kept: KeptSpectra, speedup: float) -> dict[str, tuple[str, list[int]]] | None:
    try:
        plan, _ = kept.select(speedup)
    except LeanconvError:
        return None
    return {name: (choice.scheme, list(choice.ranks)) for name, choice in plan.items()}


@pytest.mark.parametrize("case", NETWORKS)
def test_the_slider_chooses_as_python_does(case: str, chromium: Any, tmp_path: Path) -> None:
    make, (count, size, channels), arguments = NETWORKS[case]
    torch.manual_seed(0)
    network = make().eval()
    result = leanconv.accelerate(
        network, smooth_images(count, size, channels), **{"speedup": 2.0, **arguments}, **QUICK
    )
    kept = result.spectra
    assert kept is not None
    targets = [1.07, 1.35, 1.5, 1.75, 2.0, 2.4, 3.0, 4.0, 7.5]
    targets += [math.floor(100 * kept.reachable) / 100, round(1.3 * kept.reachable, 2)]
    wanted = [chosen(kept, speedup) for speedup in targets]
    assert sum(plan is not None for plan in wanted) >= 5
    if case.startswith("linked"):
        assert any(pairs for _, pairs in (kept.select(speedup) for speedup in (1.5, 2.0)))
    with Opened(chromium, write_report(result.save(tmp_path / "saved")), charts=False) as page:
        if arguments.get("ranks", "energy") == "energy":  # it begins where the run ended
            run = {layer.name: (layer.scheme, list(layer.ranks)) for layer in result.layers if layer.scheme != "merged"}
            assert ranks_in(page) == run
            assert page.locator("#what-body tr.changed").count() == 0
        for speedup, plan in zip(targets, wanted, strict=True):
            assert ask(page, speedup) == plan, speedup


def twins(scheme: Scheme, kernels: list[int], width: int, values: list[float]) -> KeptSpectra:
    """Layers that differ in nothing, or in the size of their filters only: choices tie all the time."""
    made = []
    for number, k in enumerate(kernels):
        geometry = Geometry(
            kind="conv2d", in_channels=width, out_channels=width, kernel=(k, k), padding=(k // 2, k // 2)
        )
        made.append(
            Candidate(
                name=str(number),
                geometry=geometry,
                cost=Cost.of(geometry, (28, 28), (28, 28)),
                channel=Energies(values[: geometry.channel_limit]) if scheme != "spatial" else None,
                spatial=Energies(values[: geometry.spatial_limit]) if k > 1 and scheme != "channel" else None,
            )
        )
    return KeptSpectra(scheme=scheme, candidates=tuple(made), pairs=[], fixed=1000, counted={})


def test_ties_fall_the_same_way(page: Any) -> None:
    flat, falling = [1.0] * 400, [0.97**i for i in range(400)]
    dead = [1.0] * 3 + [0.0] * 397
    cases = [
        twins(scheme, kernels, width, values)
        for scheme in ("channel", "spatial", "3d")
        for kernels in ([3, 3, 3, 3], [1, 1, 3, 1, 1])
        for width in (7, 48)  # so few that the exact search is needed; so many that only a grid of ranks is looked at
        for values in (flat, falling, dead)
    ]
    targets = [1.05, 1.13, 1.5, 2.0, 3.1, 6.0]
    found = page.evaluate(
        """([cases, targets]) => cases.map((kept) => {
             const choose = chooser(kept);
             return targets.map((speedup) => {
               const found = choose.select(speedup);
               return found.ok ? [...found.plan].map(([name, one]) => [name, one.scheme, one.ranks]) : null;
             });
           })""",
        [[kept.to_json() for kept in cases], targets],
    )
    for kept, answers in zip(cases, found, strict=True):
        for speedup, answer in zip(targets, answers, strict=True):
            plan = None if answer is None else {name: (scheme, ranks) for name, scheme, ranks in answer}
            assert plan == chosen(kept, speedup), (kept.scheme, speedup)


def test_the_slider_itself(page: Any, result: leanconv.Accelerated) -> None:
    assert result.spectra is not None
    page.focus("#what-slider")
    before = float(page.input_value("#what-number"))
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    page.wait_for_function("document.getElementById('what-body').dataset.speedup === '2.5'")
    assert before == 2.0
    assert ranks_in(page) == chosen(result.spectra, 2.5)
    assert "At 2.5x" in page.inner_text("#what-said")
    assert "speedup=2.5" in page.inner_text("#what-command")


@pytest.mark.parametrize(
    ("given", "said"),
    [("99999", "cannot be reached"), ("", "above 1"), ("0", "above 1"), ("-3", "above 1"), ("0.5", "above 1")],
)
def test_a_refusal_stands_alone(page: Any, given: str, said: str) -> None:
    assert ask(page, 2.5) is not None
    assert page.locator("#what-command").is_visible()
    page.fill("#what-number", given)
    page.wait_for_function(f"document.getElementById('what-said').textContent.includes('{said}')")
    assert not page.locator("#what-body").is_visible()
    assert page.locator("#what-command").text_content() == ""
    assert not page.locator("#what-command").is_visible()
    slider = page.locator("#what-slider")
    ends = {"": "2.5", "99999": slider.get_attribute("max")}  # an empty field moves nothing
    assert slider.input_value() == ends.get(given, slider.get_attribute("min"))
    assert ask(page, 2.5) is not None
    assert "speedup=2.5" in page.inner_text("#what-command")


def test_one_layer_is_no_layers(chromium: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    result = leanconv.accelerate(plain_network((12, 16)), smooth_images(4), ranks={"3": 5}, scheme="channel", **QUICK)
    with Opened(chromium, write_report(result.save(tmp_path / "one")), charts=False) as page:
        assert ask(page, 1.3) is not None
        assert re.match(r"At 1\.3x: 1 layer in factors, .*; 1 layer differs from", page.inner_text("#what-said"))


def test_refusals_name_what_python_names(chromium: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    result = leanconv.accelerate(plain_network((3, 4, 4)), smooth_images(4), 1.5, scheme="channel", **QUICK)
    kept = result.spectra
    assert kept is not None
    figure = re.compile(r"(?:gives|gets) ([\d.]+)x")
    coarse = 0
    with Opened(chromium, write_report(result.save(tmp_path / "coarse")), charts=False) as page:
        for speedup in [round(1.1 + 0.1 * i, 1) for i in range(40)]:
            try:
                kept.select(speedup)
            except LeanconvError as error:
                (named,) = figure.findall(str(error))
                assert ask(page, speedup) is None
                assert figure.findall(page.inner_text("#what-said")) == [named]
                if "within 2 %" in str(error):
                    coarse += 1
                    assert ask(page, float(named)) == chosen(kept, float(named)) is not None
        assert coarse >= 3
        # The slider ends at something that can be had.
        ask(page, 1.2)
        page.focus("#what-slider")
        page.keyboard.press("End")
        end = float(page.input_value("#what-number"))
        page.wait_for_function(f"document.getElementById('what-body').dataset.speedup === '{end:g}'")
        assert ranks_in(page) == chosen(kept, end) is not None
