"""Tables in plain text."""

from __future__ import annotations

from collections.abc import Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Columns padded to their widest cell; the first ``left`` aligned left, the others right.

    >>> print(table(["layer", "MMACs"], [["conv1", "9.75"], ["conv2", "10.00"]]))
    layer  MMACs
    -----  -----
    conv1   9.75
    conv2  10.00
    """
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    pads = [str.ljust if i < left else str.rjust for i in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(pad(cell, width) for pad, cell, width in zip(pads, cells, widths, strict=True)).rstrip()

    return "\n".join(line(row) for row in (heads, ["-" * width for width in widths], *rows))
