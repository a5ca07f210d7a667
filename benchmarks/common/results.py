"""What a benchmark has measured, as files: numbers for machines, a table for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def write_results(folder: Path, name: str, data: Any, table: str) -> None:
    """``data`` as NAME.json and ``table`` as NAME.md in ``folder``; the table is printed too."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    (folder / f"{name}.md").write_text(table.rstrip("\n") + "\n")
    print(table)


def slug(title: str) -> str:
    """``title`` as a part of a file's name."""
    return "-".join("".join(c for c in word if c.isalnum()) for word in title.split())
