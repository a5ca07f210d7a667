"""The list of benchmarks is complete, and each says how it is run."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
README = (FOLDER / "README.md").read_text()
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted(FOLDER.rglob("*.py"))
    if path.name != "__init__.py"
}
PROGRAMS = [name for name, path in MODULES.items() if "\ndef main(" in path.read_text()]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_says_how_it_is_run_and_is_in_the_list(name: str) -> None:
    module = importlib.import_module(name)
    assert f"\n    python -m {name}" in module.__doc__ or f"\n    taskset -c 1 python -m {name}" in module.__doc__
    assert re.search(rf"`(benchmarks\.)?{re.escape(name.removeprefix('benchmarks.'))}[ `]", README)


def test_the_list_names_no_other_program() -> None:
    for name in re.findall(r"^\|[^|]*\| `([a-z]+\.\w+)[ `]", README, re.MULTILINE):
        assert f"benchmarks.{name}" in PROGRAMS


def test_every_result_is_in_the_list() -> None:
    for path in (FOLDER / "results").glob("*.md"):
        assert f"](results/{path.name})" in README
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (FOLDER / target).exists(), target


def test_commands_in_results_and_pages_are_those_of_programs() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(FOLDER / "results").rglob("*.md")]
    for page in pages:
        if page.name == "three_c.md":  # of a commit that had other names
            continue
        text = page.read_text()
        for name in re.findall(r"python\s+-m (benchmarks[\w.]*\w)", text):
            assert name in PROGRAMS, f"{page}: {name}"
        for path in re.findall(r"benchmarks/[\w/]+\.py", text):
            assert (ROOT / path).is_file(), f"{page}: {path}"


def test_no_benchmark_changes_where_python_looks() -> None:
    for path in [*MODULES.values(), *(ROOT / "tests" / "benchmarks").glob("*.py")]:
        assert "sys" + ".path" not in path.read_text(), path


def test_what_benchmarks_replace_inside_leanconv_exists() -> None:
    """Some measure leanconv without one of its steps. A name that has moved would be noticed hours into a run."""
    replaced = [
        name
        for path in MODULES.values()
        for name in re.findall(r"\bpatch\(\s*[\"'](leanconv\.[\w.]+)[\"']", path.read_text())
    ]
    assert len(replaced) >= 3
    for name in replaced:
        pkgutil.resolve_name(name)
