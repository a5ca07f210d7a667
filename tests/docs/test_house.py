"""The architecture: a room imports only from rooms below it, and importing leanconv is cheap."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src" / "leanconv"


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name, packages without their ``__init__``."""
    named = {
        path.relative_to(SOURCE).with_suffix("").as_posix().replace("/", "."): path for path in SOURCE.rglob("*.py")
    }
    return {name.removesuffix(".__init__"): path for name, path in named.items() if name != "__init__"}


def imports(path: Path, known: Iterable[str]) -> set[str]:
    """Modules a file imports, those imported inside functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "leanconv":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}".removeprefix("leanconv.")
                found.add(whole if whole in known else node.module.removeprefix("leanconv."))
    return found & set(known)


def test_no_module_imports_itself_in_a_circle() -> None:
    known = modules()
    graph = {name: imports(path, known) - {name} for name, path in known.items()}
    # result.save reaches up to storage, which needs the result's type: the one deliberate exception.
    graph["result"].discard("storage.folder")
    TopologicalSorter(graph).prepare()


def test_mathematics_knows_no_modules() -> None:
    for path in (SOURCE / "solve").glob("*.py"):
        assert "nn.Module" not in path.read_text()


def test_files_are_of_readable_length() -> None:
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 330, path


def test_no_test_imports_another() -> None:
    """What tests share is in tests/support. Read as text: scripts that run in a process of their own are strings."""
    asked = re.compile(r"^\s*(?:from|import) +tests\b.*\b(?:test_\w+|conftest)\b", re.MULTILINE)
    for path in TESTS.rglob("*.py"):
        assert not asked.search(path.read_text()), path


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
