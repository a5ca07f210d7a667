"""The map of the house: the rooms of src/leanconv, what each is for, and which other rooms it imports.

    python -m tests.docs.house_map     # writes the map into docs/house.md

A room is a package or a module at the top of leanconv. What it is for is the first sentence of its docstring.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "leanconv"
PAGE = ROOT / "docs" / "house.md"
BLOCK = re.compile(r"(?<=<!-- map -->\n).*?(?=<!-- end of the map -->)", re.DOTALL)
# Errors are raised and files written everywhere: such rooms are left out where imports are listed.
EVERYWHERE = {"errors", "progress", "system"}

Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name, packages without their ``__init__``."""
    named = {
        path.relative_to(SOURCE).with_suffix("").as_posix().replace("/", "."): path for path in SOURCE.rglob("*.py")
    }
    return {
        name.removesuffix(".__init__"): path for name, path in named.items() if name not in ("__init__", "__main__")
    }


def _run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below ``node`` but those that only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from _run_time_nodes(child)


def imports(path: Path, known: Iterable[str]) -> set[str]:
    """Modules of leanconv that a file imports when it is run, those imported inside functions included."""
    found = set()
    for node in _run_time_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "leanconv":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}".removeprefix("leanconv.")
                found.add(whole if whole in known else node.module.removeprefix("leanconv."))
    return found & set(known)


def module_graph() -> Graph:
    """The modules each module imports."""
    known = modules()
    graph = {name: imports(path, known) - {name} for name, path in known.items()}
    # result.save reaches up to storage, which needs the result's type: the one deliberate exception.
    graph["result"].discard("storage.folder")
    return graph


def room_graph() -> Graph:
    """The rooms each room imports."""
    rooms: Graph = {}
    for name, imported in module_graph().items():
        room = name.split(".")[0]
        rooms.setdefault(room, set()).update({other.split(".")[0] for other in imported} - {room})
    return rooms


def ordered(graph: Graph) -> list[str]:
    """Each room behind all that it imports; those on one level by name."""
    level: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():
        level[room] = 1 + max((level[other] for other in graph[room]), default=0)
    return sorted(graph, key=lambda room: (level[room], room))


def purpose(module: str) -> str:
    """The first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(modules()[module].read_text())) or ""
    sentence = re.split(r"(?<=\.)\s", " ".join(docstring.split("\n\n")[0].split()))[0]
    return sentence.replace("``", "`").removesuffix(".")


def house_map() -> str:
    """A Markdown table, the lowest room first."""
    graph = room_graph()
    rows = ["| room | what it is for | imports |", "|---|---|---|"]
    packages = [name for name, path in modules().items() if path.name == "__init__.py"]
    for room in ordered(graph):
        listed = ", ".join(name for name in ordered(graph) if name in graph[room] - EVERYWHERE)
        end = "/" if room in packages else ".py"
        rows.append(f"| `{room}{end}` | {purpose(room)} | {listed} |")
        for inner in sorted(name for name in packages if name.startswith(f"{room}.")):
            rows.append(f"| `{inner.replace('.', '/')}/` | {purpose(inner)} | |")
    return "\n".join(rows)


def page_with_map(text: str) -> str:
    return BLOCK.sub(lambda _: f"\n{house_map()}\n\n", text)


if __name__ == "__main__":
    PAGE.write_text(page_with_map(PAGE.read_text()))
