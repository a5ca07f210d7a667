"""The report's slider in a real browser: it shows the plans that Python made."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import leanconv
from leanconv.report import write_report
from leanconv.report.plans import plans
from tests.support.browser import Opened, needs_browser
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images
from tests.support.reports import plan_labels as labels

pytestmark = needs_browser


def shown(page: Any) -> list[str]:
    """Forms and ranks in the table below the slider."""
    labels: list[str] = page.locator("#what-body td.new").all_inner_texts()
    return labels


def test_the_slider_itself(page: Any, result: leanconv.Accelerated) -> None:
    assert result.spectra is not None
    places = [plan.speedup for plan in plans(result.spectra, 2.0)]
    assert page.input_value("#what-number") == "2"
    assert shown(page) == labels(result.spectra, 2.0)
    assert page.locator("#what-body tr.changed").count() == 0
    page.focus("#what-slider")
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    speedup = places[places.index(2.0) + 5]
    assert float(page.input_value("#what-number")) == speedup
    assert page.get_attribute("#what-slider", "aria-valuetext") == f"{speedup:g}x"
    assert shown(page) == labels(result.spectra, speedup)
    assert page.locator("#what-body tr.changed").count() > 0
    assert f"At {speedup:g}x" in page.inner_text("#what-said")
    assert f"speedup={speedup:g}" in page.inner_text("#what-command")
    page.keyboard.press("End")
    assert float(page.input_value("#what-number")) == places[-1]
    assert shown(page) == labels(result.spectra, places[-1])


@pytest.mark.parametrize(("typed", "place"), [("99999", -1), ("0", 0), ("-3", 0), ("", None)])
def test_a_number_goes_to_the_nearest_plan(
    page: Any, result: leanconv.Accelerated, typed: str, place: int | None
) -> None:
    assert result.spectra is not None
    places = [plan.speedup for plan in plans(result.spectra, 2.0)]
    for number, expected in (("2.02", 2.0), (typed, 2.0 if place is None else places[place])):
        page.fill("#what-number", number)
        page.keyboard.press("Enter")
        assert float(page.input_value("#what-number")) == expected
        assert page.input_value("#what-slider") == str(places.index(expected))
        assert shown(page) == labels(result.spectra, expected)


def test_one_layer_is_no_layers(chromium: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    result = leanconv.accelerate(
        plain_network((12, 16)), smooth_images(4), ranks={"3": 5}, scheme="channel", samples=400, progress=False
    )
    with Opened(chromium, write_report(result.save(tmp_path / "one")), charts=False) as page:
        page.fill("#what-number", "1.3")
        page.keyboard.press("Enter")
        assert re.match(r"At 1\.[23]\d*x: 1 layer replaced, .*; 1 layer differs from", page.inner_text("#what-said"))
