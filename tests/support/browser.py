"""A report in a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import leanconv
from leanconv.report import write_report
from tests.support.reports import record_all

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium was found on this machine")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as found:
        browser = found.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page from file://, drawn, that must not complain; without ``charts`` in a browser that cannot unpack them."""

    def __init__(self, chromium: Any, path: Path, *, width: int = 1200, charts: bool = True):
        self.page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme="light")
        self.said: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.said.extend([request.url] * (request.url[:5] == "http:")))
        if not charts:
            self.page.add_init_script("delete window.DecompressionStream")
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-drawn]" if charts else ".chart .broken", timeout=20_000)

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *error: Any) -> None:
        self.page.close()
        if error[0] is None:
            assert self.said == []


@pytest.fixture(scope="module")
def opened(chromium: Any, result: leanconv.Accelerated, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A report with everything in it, opened once."""
    folder = result.save(tmp_path_factory.mktemp("report") / "saved")
    record_all(folder, result)
    with Opened(chromium, write_report(folder)) as page:
        yield page


@pytest.fixture
def page(opened: Any) -> Any:
    """As it was when it was opened."""
    opened.set_viewport_size({"width": 1200, "height": 900})
    opened.evaluate("delete document.documentElement.dataset.theme")
    opened.emulate_media(media="screen", color_scheme="light")
    return opened
