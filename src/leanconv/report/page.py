"""Facts -> one HTML file that needs nothing else: styles, scripts, data and the plotting library are inside."""

from __future__ import annotations

import base64
import functools
import gzip
import json
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from importlib import resources
from typing import Any

from leanconv import __version__
from leanconv.errors import LeanconvError
from leanconv.ranks import KeptSpectra
from leanconv.report import head, sections
from leanconv.report.facts import Facts, LayerFacts
from leanconv.report.sections import SLOWEST

# In the first bytes of every report: what says that a file is one, and may be replaced.
MARK = "leanconv report, version 1"


def page(facts: Facts) -> str:
    """The whole file. Everything that comes from outside is escaped where it is put in."""
    e = escape
    figure, fewer = head.change(facts.macs_before, facts.macs_after, "dearer")
    pieces = {
        "mark": MARK,
        "title": e(f"{facts.network}, {figure}{'' if fewer == 'fewer' else f' {fewer}'}: leanconv report"),
        "heading": e(f"{facts.network}, {figure} {'fewer' if fewer == 'fewer' else f'{fewer} in'} MACs"),
        "summary": e(head.summary(facts)),
        "cards": head.cards(facts),
        "advice": head.advised(facts),
        "layers": sections.layers(facts),
        "legend": e(sections.legend(facts)),
        "ranks_label": e(sections.ranks_label(facts)),
        "curves": sections.curves(facts),
        "error_title": e(f"Error behind the activation{sections.when(facts)}"),
        "error_label": e(sections.error_label(facts)),
        "times": sections.times(facts),
        "accuracy": sections.accuracy(facts),
        "what_if": sections.what_if(facts),
        "skipped": sections.skipped(facts),
        "repeat": sections.repeated(facts),
        "footer": e(f"Written by leanconv {__version__}. This file needs no network and sends nothing."),
        "facts": _island(_data(facts)),
        "plotly": _packed_plotly(),
        "css": _file("page.css"),
        "search_js": _file("search.js"),
        "select_js": _file("select.js"),
        "page_js": _file("page.js"),
        "charts_js": _file("charts.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: pieces[found[1]], _file("page.html"))


def _file(name: str) -> str:
    return resources.files("leanconv.report").joinpath(name).read_text(encoding="utf-8")


def _island(data: dict[str, Any]) -> str:
    """JSON inside a script element: no ``<`` is left that could end it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _data(facts: Facts) -> dict[str, Any]:
    """What the scripts need."""
    asked = None if facts.options["ranks"] == "latency" else facts.options["speedup"]  # else it is one of time
    return {
        "macs_before": facts.macs_before,
        "macs_after": facts.macs_after,
        # Ranks by hand or by time have no target; the nearest one below what they gave is shown, if the slider has it.
        "target": max(SLOWEST, math.floor(20 * facts.speedup) / 20) if asked is None else asked,
        "tuned": facts.tuned is not None,
        "another": facts.another,
        "layers": [_layer(layer) for layer in facts.layers],
        "times": [asdict(layer) for layer in facts.times.layers] if facts.times else [],
        "spectra": None if facts.spectra is None else _spectra(facts.spectra),
    }


def _layer(layer: LayerFacts) -> dict[str, Any]:
    """JSON has no infinity, which the error is where the original's responses are all 0 and these are not."""
    finite = layer.error is not None and math.isfinite(layer.error)
    return {**asdict(layer), "error": layer.error if finite else None}


def _spectra(kept: KeptSpectra) -> dict[str, Any]:
    """As ``to_json``, with the numbers as bytes: half as long, and every bit kept."""
    data = kept.to_json()
    del data["counted"]
    for layer in data["layers"]:
        layer["channel"], layer["spatial"] = _bytes(layer["channel"]), _bytes(layer["spatial"])
    return data


def _bytes(values: Sequence[float] | None) -> str | None:
    return None if values is None else base64.b64encode(struct.pack(f"<{len(values)}d", *values)).decode()


@functools.cache
def plotly_js() -> str:
    """The plotting library, for browsers."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise LeanconvError("plotly is not installed; pip install 'leanconv[report]'.") from None
    text: str = get_plotlyjs()
    return text


@functools.cache
def _packed_plotly() -> str:
    return base64.b64encode(gzip.compress(plotly_js().encode(), mtime=0)).decode()
