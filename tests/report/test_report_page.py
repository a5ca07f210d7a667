"""The report in a real browser: charts, light and dark, a phone, paper, keyboard, and what axe-core finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import leanconv
from leanconv.report.render import page as page_of
from tests.support.browser import Opened, needs_browser
from tests.support.reports import NASTY, many_layers

pytestmark = needs_browser


def test_every_mark_is_there(page: Any, result: leanconv.Accelerated) -> None:
    layers, counted = len(result.layers), len(result.layers) + len(result.skipped)
    assert result.spectra is not None
    assert page.locator("#strip [role=option]").count() == counted
    assert page.locator("#chart-error .bars .point").count() == layers
    assert page.locator("#chart-ranks .bars .point").count() == 2 * layers  # d'' and d'
    assert page.locator("#chart-ranks .scatter .point").count() == layers
    assert page.locator("#chart-time .bars .point").count() == 2 * layers
    for chart in ("#chart-channel", "#chart-spatial"):
        assert page.locator(f"{chart} .scatter .js-line").count() == len(result.spectra.candidates)
        assert page.locator(f"{chart} .scatter .point").count() == layers
    widths = page.eval_on_selector_all("#strip rect", "(all) => all.map((one) => Number(one.getAttribute('width')))")
    before, after = widths[::2], widths[1::2]
    assert sum(before) / sum(after) == pytest.approx(result.speedup)
    for layer, width in zip(result.layers, after[1:], strict=True):
        assert width / sum(before) == pytest.approx(layer.macs_after / result.macs_before)


def test_paper_has_what_is_folded(chromium: Any, tmp_path: Path) -> None:
    facts = many_layers(3, 8)
    path = tmp_path / "folded.html"
    path.write_text(page_of(replace(facts, skipped={"by choice": [f"left.{i}" for i in range(12)]})))
    with Opened(chromium, path) as page:
        page.eval_on_selector("details", "(one) => { one.open = true; }")
        states = "[...document.querySelectorAll('details')].map((one) => one.open)"
        before = page.evaluate(states)
        assert before == [True, False]
        page.emulate_media(media="print")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.evaluate(states) == [True, True]
        assert page.get_by_text("left.11").is_visible()
        assert page.get_by_text("Energy at the chosen ranks").is_visible()
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.evaluate(states) == before


def test_without_scripts_there_is_nothing_dead(chromium: Any, opened: Any) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(opened.url)
    for gone in ("#what-slider", "#what-number", "#what-body", "#readout", "#strip", "#chart-error"):
        assert not page.locator(gone).is_visible(), gone
    assert "Point at a layer" not in page.inner_text("body")
    assert "need JavaScript; the tables do not" in page.inner_text("body")
    assert page.get_by_text("Every layer that counts").is_visible()
    page.emulate_media(media="print")
    assert page.get_by_text("Energy at the chosen ranks").is_visible()  # folded, and still on paper
    context.close()


def test_errors_of_a_tuned_network_are_dated(chromium: Any, tmp_path: Path) -> None:
    path = tmp_path / "tuned.html"
    path.write_text(page_of(replace(many_layers(3, 8), tuned={"epochs": 1, "distilled": True})))
    with Opened(chromium, path, charts=False) as page:
        page.focus("#strip [role=option] >> nth=0")
        assert page.inner_text("#readout").endswith("error 0.100 before fine-tuning")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(page: Any, scheme: str) -> None:
    def brightness(page: Any) -> list[float]:
        """Of the paper, of the ink, and of the numbers on a chart's axis."""
        colours = page.evaluate(
            """() => [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,
                      getComputedStyle(document.querySelector('#chart-error .ytick text')).fill]"""
        )
        return [sum(int(part) for part in text[4:-1].split(",")[:3]) / 765 for text in colours]

    page.emulate_media(color_scheme=scheme)
    page.wait_for_function(f"document.getElementById('theme').ariaPressed === '{str(scheme == 'dark').lower()}'")
    for expected in (scheme, "dark" if scheme == "light" else "light"):
        paper, ink, axis = brightness(page)
        assert (paper > 0.8 and ink < 0.3 and axis < 0.3) == (expected == "light")
        assert (paper < 0.2 and ink > 0.7 and axis > 0.7) == (expected == "dark")
        assert page.get_attribute("#theme", "aria-pressed") == str(expected == "dark").lower()
        page.click("#theme")
    # On paper it is light, whatever the screen is.
    page.emulate_media(media="print", color_scheme="dark")
    page.wait_for_function(
        "getComputedStyle(document.querySelector('#chart-error .ytick text')).fill === 'rgb(0, 0, 0)'"
    )
    assert brightness(page) == [1, 0, 0]


def test_a_phone(page: Any, chromium: Any, tmp_path: Path) -> None:
    long = many_layers(40, 8)
    layers = [replace(layer, name=f"{layer.name}.{'very.' * 12}{NASTY}") for layer in long.layers]
    assert long.spectra is not None
    candidates = tuple(replace(c, name=one.name) for c, one in zip(long.spectra.candidates, layers, strict=True))
    path = tmp_path / "long.html"
    path.write_text(page_of(replace(long, layers=layers, spectra=replace(long.spectra, candidates=candidates))))
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_function("document.querySelector('#chart-time svg').getBoundingClientRect().right <= 390")
    with Opened(chromium, path, width=390) as other:
        for shown in (page, other):
            assert shown.evaluate("document.documentElement.scrollWidth") == 390
            widest = shown.eval_on_selector_all(
                "section, .box, .chart svg", "(all) => Math.max(...all.map((one) => one.getBoundingClientRect().right))"
            )
            assert widest <= 390


def test_the_keyboard_reaches_everything(page: Any, result: leanconv.Accelerated) -> None:
    page.focus("#strip [role=option] >> nth=0")
    assert page.inner_text("#readout").startswith("0: ")
    page.keyboard.press("ArrowRight")
    first = result.layers[0]
    assert page.inner_text("#readout").startswith(f"{first.name}: ")
    assert f"error {first.error:.3f}" in page.inner_text("#readout")
    page.keyboard.press("End")
    assert page.inner_text("#readout").startswith(f"{result.layers[-1].name}: ")
    reached = set()
    page.focus("#theme")
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"what-slider", "what-number", "SUMMARY", "g", "DIV"} <= reached  # DIV: boxes that scroll
    # Every chart says in words what it shows.
    labels = page.eval_on_selector_all(".chart", "(all) => all.map((one) => one.getAttribute('aria-label'))")
    assert all("table" in label for label in labels)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(page: Any, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    page.emulate_media(color_scheme=scheme)
    page.eval_on_selector_all("details", "(all) => all.forEach((one) => { one.open = true; })")
    found = axe.run(page).response["violations"]
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    assert serious == [], [(one["id"], [node["html"][:120] for node in one["nodes"]]) for one in serious]
    assert page.evaluate("Boolean(window.axe)")  # it ran


def test_names_run_nothing(chromium: Any, tmp_path: Path) -> None:
    facts = many_layers(3, 16)
    evil = [f"<img src=x onerror=alert(1)>{NASTY}", "</script><script>alert(2)</script>", "${alert(3)}"]
    layers = [replace(layer, name=name) for layer, name in zip(facts.layers, evil, strict=True)]
    assert facts.spectra is not None
    candidates = tuple(replace(c, name=name) for c, name in zip(facts.spectra.candidates, evil, strict=True))
    spectra = replace(facts.spectra, candidates=candidates)
    path = tmp_path / "evil.html"
    path.write_text(page_of(replace(facts, layers=layers, network=evil[0], folder=evil[1], spectra=spectra)))
    with Opened(chromium, path) as page:
        page.on("dialog", lambda dialog: pytest.fail(dialog.message))
        page.hover("#chart-error .bars .point >> nth=0", force=True)
        page.wait_for_selector("#chart-error .hovertext")
        assert page.locator("#chart-error .hovertext").text_content().startswith(evil[0])
        page.hover("#strip rect >> nth=0")
        assert page.locator("img").count() == 0
        assert page.inner_text("#readout").startswith(evil[0])
        assert page.locator("h1").inner_text().startswith(evil[0])
