"""What the README and the guide print, runs; what they link to, exists.

Python blocks of a page run in order in one namespace, commands as they are printed, in a small world (``world.py``). A
``text`` block behind a Python block is what that prints, and one that begins with ``$`` what a command prints: words
and columns are compared, numbers belong to the machine they were printed on. Any other ``text`` block is a drawing.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import itertools
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer

import leanconv
from leanconv import demo
from leanconv.cli.main import app
from leanconv.config import Options
from tests.support.option_table import table_of
from tests.support.small_world import command, shape_of

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "leanconv"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Words that stand for something of the reader's.
MEANT = {
    "MODEL": "vgg16",
    "ORIGINAL": "vgg16",
    "ACCELERATED": "vgg16-4x",
    "FOLDER": "vgg16-4x",
    "PATH": "imagenet/val",
}
# Programs that are not here; the pages say so.
ELSEWHERE = {"trtexec", "jupyter"}
# Names a page takes for granted: they are the reader's.
GIVEN = {"engine.md": ("model", "images"), "finetune.md": ("data",)}
# Tables that are copied into a page by hand.
COPIED = {
    "README.md": ("ablation-summary.md",),
    "docs/results.md": ("vgg16_imagenet.md", "ablation-summary.md", "solver-cpu.md", "solver-cuda.md"),
    "docs/choosing.md": ("speed-cpu.md",),
    "docs/finetune.md": ("judges.md",),
    "docs/how.md": ("optimizers.md", "splits.md"),
    "docs/networks.md": ("residual.md",),
    "docs/engine.md": ("engine-cpu.md", "engine-cpu-memory.md", "engine-cuda.md", "kill.md"),
}


@dataclass(frozen=True)
class Block:
    """Of a page: a code block, its language, the file it is to be put in, and its line."""

    language: str
    title: str | None
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(found[1], found[2], found[3], text[: found.start()].count("\n") + 1)
        for found in re.finditer(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    ]


@dataclass
class Shell:
    """Runs lines of a page. What another page has made or printed with the same words is not made again."""

    kept: Path
    done: dict[tuple[str, ...], Path | None] = field(default_factory=dict)

    def run(self, line: str) -> None:
        words = [MEANT.get(word, word) for word in shlex.split(line, comments=True)]
        match words:
            case []:
                pass
            case ["torchrun", *_]:  # several processes have tests of their own
                self.leanconv(words[words.index("leanconv") + 1 :])
            case ["leanconv", *rest]:
                self.leanconv(rest)
            case ["python", script, *_] if Path(script).exists():
                runpy.run_path(script, run_name="__main__")
            case ["python", "-m", module, *options] if module.startswith("benchmarks."):
                self.known_options(f"{module.replace('.', '/')}.py", options)
            case ["python", script, *options]:
                self.known_options(script, options)
            case ["make", target]:
                assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no make {target}"
            case ["source", script]:
                assert script == ".venv/bin/activate"
            case [program, *_]:
                assert program in ELSEWHERE, f"{program!r} is no command known here; a drawing is a ```text block"

    def known_options(self, script: str, options: list[str]) -> None:
        """Examples and benchmarks have tests of their own."""
        text = (ROOT / script).read_text()
        for option in options:
            assert not option.startswith("--") or f'"{option}"' in text, f"{script} has no {option}"

    def leanconv(self, words: list[str]) -> None:
        """A page may make a thing twice, though the command overwrites nothing."""
        out = Path(words[words.index("--out") + 1]) if "--out" in words else None
        copy = self.kept / str(len(self.done))
        if out is not None:
            _remove(out)
        if tuple(words) not in self.done or "--record" in words:
            command(words)
            self.done[tuple(words)] = None if out is None else _copy(out, copy)
        elif out is not None:
            _copy(self.done[tuple(words)], out)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _copy(path: Path, to: Path) -> Path:
    return Path(shutil.copytree(path, to) if path.is_dir() else shutil.copy(path, to))


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path_factory.mktemp("kept"))


def heads(text: str) -> list[str]:
    """The lines above rules: names of columns."""
    lines = text.splitlines()
    return [" ".join(above.split()) for above, rule in itertools.pairwise(lines) if set(rule) == set("- ")]


def readers_own(names: tuple[str, ...]) -> dict[str, Any]:
    pictures, labels = demo.digits()
    known = {"images": pictures[:100], "data": pictures[:40], "model": demo.train(pictures, labels, epochs=1)}
    return {"leanconv": leanconv, **{name: known[name] for name in names}}


@pytest.mark.nightly
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page: Path, world: Path, shell: Shell) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    if page.name in GIVEN:
        namespace |= readers_own(GIVEN[page.name])
    printed = ""
    for block in blocks_of(page):
        where = f"{page.name}:{block.line}"
        if block.language == "python" and block.title is not None:
            Path(block.title).write_text(block.text)
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(block.text, where, "exec"), namespace)
            printed = output.getvalue()
        elif block.language == "text" and block.text.startswith("$ "):
            line, _, shown = block.text.partition("\n")
            with contextlib.redirect_stdout(io.StringIO()) as output:
                shell.run(line.removeprefix("$ "))
            assert heads(shown) == heads(output.getvalue()), where
        elif block.language == "text":
            assert not printed or shape_of(printed) == shape_of(block.text), where
            printed = ""
        else:
            assert block.language == "", f"{where}: a block is python, text, or without a name for commands"
            for line in block.text.replace("\\\n", "").splitlines():
                shell.run(line)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "line",
    [
        "leanconv bench vgg16 --nonsense",
        "leanconv evaluate vgg16 vgg16-4x --data nowhere",
        "leanconf demo",
        "python examples/classify.py photos/ --nonsense",
        "make nothing",
    ],
)
def test_a_line_that_does_not_work_is_noticed(line: str, world: Path, shell: Shell) -> None:
    with pytest.raises(AssertionError):
        shell.run(line)


@pytest.mark.nightly
def test_the_commands_in_the_help_run(world: Path, shell: Shell) -> None:
    lines = []
    for name in typer.main.get_command(app).commands:
        help_text = sys.modules[f"leanconv.cli.{name}"].__dict__[name].__doc__
        lines += re.findall(r"^ *(?:Example: )?((?:leanconv [a-z]+ \w|torchrun ).*)$", help_text, re.MULTILINE)
    assert len(lines) > 15
    for line in lines:
        shell.run(line)


@pytest.mark.parametrize(
    "path", [path for path in sorted(SOURCE.rglob("*.py")) if ">>> " in path.read_text()], ids=lambda path: path.stem
)
def test_examples_in_docstrings(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_first_table_of_the_readme() -> None:
    """The test of the blocks leaves numbers out; these hold on any machine."""
    (shown,) = [block.text for block in blocks_of(ROOT / "README.md") if block.text.startswith("layer ")]
    assert re.search(r"^4\.0\d\dx fewer MACs: 29\.4 M -> 7\.\d M", shown, re.MULTILINE)
    convolutions = [name for name, module in demo.DigitsNet().named_modules() if type(module).__name__ == "Conv2d"]
    assert re.findall(r"^(\d+)  ", shown, re.MULTILINE) == convolutions[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_extras_in_the_text_exist(page: Path) -> None:
    commands = typer.main.get_command(app).commands
    text = page.read_text()
    for spoken in re.findall(r"`leanconv ([a-z][^`]*)`", text.replace("\n", " ")):
        name, *words = spoken.split()
        assert name in commands, f"`leanconv {spoken}`"
        options = {option for parameter in commands[name].params for option in parameter.opts} | {"--help"}
        assert {word for word in words if word.startswith("--")} <= options, f"`leanconv {spoken}`"
    extras = re.search(r"optional-dependencies\](.*?)\n\[", (ROOT / "pyproject.toml").read_text(), re.DOTALL)[1]
    for names in re.findall(r"pip install '(?:leanconv|\.)\[([\w,]+)\]'", text):
        for name in names.split(","):
            assert re.search(rf"^{name} = ", extras, re.MULTILINE), f"there is no extra {name}"


@pytest.mark.parametrize("page", list(COPIED))
def test_tables_are_the_committed_results(page: str) -> None:
    text = (ROOT / page).read_text()
    for name in COPIED[page]:
        assert (RESULTS / name).read_text().strip() in text, f"{name} changed; copy it into {page}"


def test_the_table_of_options_is_made_from_them() -> None:
    assert f"\n{table_of(Options)}\n" in (ROOT / "docs" / "stages.md").read_text()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_readme_counts_the_zoo() -> None:
    count = len(json.loads((RESULTS / "zoo.json").read_text())["rows"])
    assert f"[a table of {count} networks](benchmarks/results/zoo.md)" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", ["contributing", "house", "streams"])
def test_files_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", text):
        places = [ROOT, SOURCE, SOURCE / "calibrate"]
        assert "NAME" in name or any((place / name).exists() for place in places), f"{page}.md names {name}"


def test_figures_are_drawn_from_what_was_measured(tmp_path: Path) -> None:
    """Every figure of the guide, for light and dark pages, and no other."""
    figures = runpy.run_path(str(ROOT / "docs" / "figures.py"))
    measured = json.loads((ROOT / "docs" / "figures" / "measured.json").read_text())
    drawn = {path.name for path in figures["draw"](measured, tmp_path)}
    assert drawn == {path.name for path in (ROOT / "docs" / "figures").glob("*.svg")}
    shown = {name for page in PAGES for name in re.findall(r"\]\(figures/([\w-]+\.svg)\)", page.read_text())}
    assert shown == {name for name in drawn if "-dark" not in name}


@pytest.mark.nightly
def test_the_site_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    """Built without a warning; every script, style and picture is in it."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text()
        fetched = re.findall(r'<(?:script|img)[^>]* src="([^"]+)"', text)
        fetched += re.findall(r'<link[^>]* href="([^"]+)"[^>]* rel="(?:stylesheet|icon|preload|preconnect)"', text)
        fetched += re.findall(r'<link[^>]* rel="(?:stylesheet|icon|preload|preconnect)"[^>]* href="([^"]+)"', text)
        assert fetched
        for target in fetched:
            path = target.split("#")[0].split("?")[0]
            assert (tmp_path / path.lstrip("/") if path.startswith("/") else page.parent / path).exists(), target
