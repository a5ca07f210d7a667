"""What decides the last bits of a result, and what was recorded for it."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
DIGESTS = HERE / "digests.json"  # machine -> name of a cell -> facts
KEPT = HERE / "folders.json"  # facts about the folders below, the same everywhere, and for each machine
FOLDERS = HERE / "folders"
WORKDIR = HERE / "workdir"
HELP = HERE / "help"


def processor() -> str:
    """The model's name and numbers: a virtual machine often says no more than the maker's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    numbers = "/".join(said.get(key, "?") for key in ("cpu family", "model"))
    return f"{said.get('model name', platform.machine())} {numbers}"


def this_machine() -> str:
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {processor()}"


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}  # type: ignore[no-any-return]


def write(path: Path, data: dict[str, Any]) -> None:
    """A value a line, in the order of names, so that a change is easy to see."""
    path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
