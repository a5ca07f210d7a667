"""The architecture: a room imports only from rooms below it, and importing leanconv is cheap."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from leanconv.forms import FORMS
from tests.docs.house_map import BLOCK, PAGE, SOURCE, module_graph, modules, page_with_map, purpose, room_graph

TESTS = Path(__file__).parents[1]
MOST_PACKAGES, MOST_MODULES = 16, 6


def test_no_module_imports_itself_in_a_circle() -> None:
    assert list(TopologicalSorter(module_graph()).static_order())  # a circle raises CycleError


def test_rooms_import_one_another_one_way_only() -> None:
    assert list(TopologicalSorter(room_graph()).static_order())  # a circle raises CycleError


def test_there_are_few_rooms() -> None:
    top = {name: path for name, path in modules().items() if "." not in name}
    packages = [name for name, path in top.items() if path.name == "__init__.py"]
    assert len(packages) <= MOST_PACKAGES, packages
    assert len(top) - len(packages) <= MOST_MODULES, set(top) - set(packages)


def test_every_package_says_what_it_is_for() -> None:
    for name, path in modules().items():
        assert path.name != "__init__.py" or purpose(name), f"{path} needs a docstring: one sentence"


def test_the_map_of_the_house_is_that_of_the_imports() -> None:
    text = PAGE.read_text()
    assert BLOCK.search(text)
    assert text == page_with_map(text), "write it again: python -m tests.docs.house_map"


def test_mathematics_knows_no_modules() -> None:
    for path in (SOURCE / "solve").glob("*.py"):
        assert "nn.Module" not in path.read_text()


def test_files_are_of_readable_length() -> None:
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, path


def compared(text: str, names: Iterable[str]) -> list[int]:
    """Lines on which something is compared with one of these words, alone or among others."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare | ast.MatchValue):
            words = {inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)}
            found += [node.lineno] if words & set(names) else []
    return found


def test_a_forms_name_is_compared_with_in_the_forms_room_alone() -> None:
    """The rest asks a form what it wants to know: a new one is one file."""
    for path in SOURCE.rglob("*.py"):
        if not path.is_relative_to(SOURCE / "forms"):
            assert not compared(path.read_text(), FORMS), path


@pytest.mark.parametrize(
    "line",
    [
        "x = scheme == 'channel'",
        "x = 'spatial' != scheme",
        "x = scheme in ('channel', '3d')",
        "x = 1 if choice.form.name in {'merged'} else 2",
        "match scheme:\n    case '3d' | 'spatial': pass",
    ],
)
def test_comparisons_with_a_forms_name_are_seen(line: str) -> None:
    assert compared(line, FORMS)
    assert not compared(re.sub(r"'(\w+)'", r"'other \1'", line), FORMS)
    assert not compared("x = {'channel': 1}['channel']", FORMS)


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


def test_accelerate_loads_only_what_it_needs() -> None:
    """No exporter, no timing, no report, no reader of files, no command line."""
    script = "import sys, leanconv; leanconv.accelerate; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    words = ("onnx", "runtimes.bench", "runtimes.export", "report", "images", "cli", "evaluation", "train", "kernels")
    loaded = [name for name in done.stdout.split() if name.startswith("leanconv.")]
    assert not [name for name in loaded if name.removeprefix("leanconv.").startswith(words)]
