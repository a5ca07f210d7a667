"""HTML by function: whatever is not made here goes in escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from leanconv.report.measured import Interval

Cell = str  # a table's cell, not yet escaped

EMPTY = ("input",)  # elements without an end


def text(value: object) -> str:
    return escape(str(value))


def tag(name: str, *children: str, klass: str | None = None, **attributes: str) -> str:
    """An element around ``children``, which are HTML. ``for_`` and ``aria_label`` are ``for`` and ``aria-label``."""
    given = {"class": klass} if klass else {}
    given |= {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    opening = " ".join([name, *(f'{key}="{escape(value)}"' for key, value in given.items())])
    return f"<{opening}>" if name in EMPTY else f"<{opening}>{''.join(children)}</{name}>"


def paragraph(said: str, klass: str | None = None) -> str:
    return tag("p", text(said), klass=klass)


def pre(said: str) -> str:
    return tag("pre", tag("code", text(said)))


def folded(title: str, content: str) -> str:
    return tag("details", tag("summary", text(title)), content)


def table_of(caption: str, heads: Sequence[str], rows: Sequence[Sequence[Cell]], body: str | None = None) -> str:
    """A table in a box of its own that scrolls, also by keyboard; the first column names the row."""
    top = tag(
        "tr", *(tag("th", text(head), scope="col") if head or i == 0 else "<td></td>" for i, head in enumerate(heads))
    )
    lines = [
        tag("tr", tag("th", text(row[0]), scope="row"), *(tag("td", text(cell)) for cell in row[1:])) for row in rows
    ]
    inner = tag("tbody", *lines, **({} if body is None else {"id": body}))
    table = tag("table", tag("caption", text(caption)), tag("thead", top), inner)
    return tag("div", table, klass="box", tabindex="0", role="region", aria_label=caption)


def si(value: float) -> str:
    """Three digits and a unit: 29.4 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            number = value / size
            return f"{number:.{max(0, 2 - len(str(int(number))) + 1)}f} {unit}"
    return f"{value:g}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def points(share: float) -> str:
    """Signed, in points of a percentage."""
    return f"{round(100 * share, 2) + 0.0:+.2f}"  # + 0.0: no "-0.00"


def interval(found: Interval, form: str) -> str:
    return f"{form.format(found.low)} to {form.format(found.high)}"


def count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
