"""What a benchmark has found, as files: numbers for machines, a table for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def keep(out: Path, name: str, found: Any, table: str) -> None:
    """``found`` as NAME.json and ``table`` as NAME.md in ``out``; the table is printed too."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / f"{name}.md").write_text(table.rstrip("\n") + "\n")
    print(table)
