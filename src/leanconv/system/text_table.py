"""Tables in plain text."""

from __future__ import annotations

from collections.abc import Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Columns padded to their widest cell; the first ``left`` are flush left, the others flush right.

    >>> print(table(["layer", "MMACs"], [["conv1", "9.75"], ["conv2", "10.00"]]))
    layer  MMACs
    -----  -----
    conv1   9.75
    conv2  10.00
    """
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(heads), line(["-" * width for width in widths]), *(line(row) for row in rows)])
