"""The architecture: a room imports only from rooms below it, and importing leanconv is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "leanconv"

# Bottom first. Rooms of one storey do not import each other.
STOREYS = [
    {"errors", "_version", "table", "methods", "textfile"},
    {"solve", "models", "locked", "progress", "records", "clock", "beside"},
    {"network", "images"},
    {"ranks", "calibrate", "evaluate", "target", "kernels"},
    {"options", "fit", "entrance", "team"},
    {"result", "inspection", "workdir"},
    {"storage", "export", "engine", "spectra"},
    {"reconstruction", "bench", "report", "sampling"},
    {"solving", "baselines", "compare", "doctor", "latency", "sensitivity", "sweeping"},
    {"job"},
    {"train"},
    {"_accelerate"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
HEIGHT = {room: storey for storey, rooms in enumerate(STOREYS) for room in rooms}


def imports(path: Path) -> set[str]:
    """Rooms a file imports, those only needed at run time inside functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module in ("leanconv", "leanconv.cli", "leanconv.network"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("leanconv.")}
    return found


def test_data_flows_one_way() -> None:
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        for other in imports(path) - {room}:
            # result.save reaches up to storage, which needs the result's type: the one deliberate exception.
            if (room, other) == ("result", "storage"):
                continue
            assert HEIGHT[other] < HEIGHT[room], f"{path.name} ({room}) imports {other}"


def test_mathematics_knows_no_modules() -> None:
    for path in (SOURCE / "solve").glob("*.py"):
        assert "nn.Module" not in path.read_text()


def test_files_are_of_readable_length() -> None:
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 330, path


def test_import_is_cheap() -> None:
    script = "import sys, leanconv; assert 'torch' not in sys.modules; leanconv.accelerate, leanconv.load\n"
    script += "import torch; assert not torch.cuda.is_initialized()\n"
    script += (
        "optional = {'typer', 'rich', 'sklearn', 'timm', 'plotly', 'onnx', 'onnxruntime', 'openvino', 'matplotlib'}\n"
    )
    script += "assert not optional & set(sys.modules)\n"
    script += "assert callable(leanconv.accelerate)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
