"""A comparison as one HTML file that needs nothing else, in the dress of the report."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from leanconv import __version__
from leanconv.errors import LeanconvError, listing
from leanconv.report.compare.charts import against_macs, against_time, measures
from leanconv.report.compare.missing import evaluate_command
from leanconv.report.compare.results import Comparison
from leanconv.report.compare.text import tables
from leanconv.report.markup import paragraph, table_of, tag, text
from leanconv.report.page import plotly_js
from leanconv.report.write import check_place, put

# In the first bytes of every comparison, which may be replaced by another.
MARK = "leanconv comparison, version 1"


def check_page(path: Path) -> None:
    """Refuse a place that cannot take a page, or a machine that cannot draw one, before anything is read."""
    if path.suffix != ".html" or path.is_dir():
        raise LeanconvError(f"--plot {str(path)!r} must be a file whose name ends in .html.")
    check_place(path, MARK, "comparison")


def write_page(found: Comparison, path: Path) -> Path:
    put(page(found), path)
    return path


def page(found: Comparison) -> str:
    """The whole file. Everything that comes from outside is escaped where it is put in."""
    macs, times = against_macs(found.results), against_time(found.results)
    if not macs:
        raise LeanconvError(
            "there is nothing to plot, as no accuracy is recorded; record it: "
            f"{evaluate_command(found.results[0], found.results)}"
        )
    measure = listing(measures(found.results))
    pieces = {
        "mark": MARK,
        "title": text(f"{len(found.results)} results of leanconv"),
        "heading": text(f"{len(found.results)} results beside one another"),
        "sources": text(listing(dict.fromkeys(result.source for result in found.results))),
        "macs": _chart("chart-macs", f"{measure} against multiply-accumulates; the tables below have the numbers"),
        "times": _chart("chart-times", f"{measure} against milliseconds; the tables below have the numbers")
        if times
        else paragraph("No times are recorded for these folders."),
        "tables": "".join(table_of(one.title, one.heads, one.cells) for one in tables(found.results)),
        "remarks": tag("ul", *(tag("li", text(one)) for one in found.remarks), klass="reasons")
        if found.remarks
        else paragraph("All were measured alike."),
        "footer": text(f"Written by leanconv {__version__}. This file needs no network and sends nothing."),
        "data": _data({"measure": measure, "charts": {"chart-macs": macs, "chart-times": times}}),
        "plotly": plotly_js(),
        "css": resources.files("leanconv.report").joinpath("page.css").read_text(encoding="utf-8"),
        "script": _file("page.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: pieces[place[1]], _file("page.html"))


def _chart(name: str, label: str) -> str:
    return tag("figure", tag("div", klass="chart", id=name, role="img", aria_label=label))


def _data(data: dict[str, Any]) -> str:
    """JSON inside a script element, which no ``<`` can end."""
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")


def _file(name: str) -> str:
    return resources.files("leanconv.report.compare").joinpath(name).read_text(encoding="utf-8")
