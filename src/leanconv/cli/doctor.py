"""``leanconv doctor``."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import NamedTuple

import typer

from leanconv import __version__
from leanconv.cli import common
from leanconv.errors import LeanconvError
from leanconv.runtimes.runners import RUNTIMES, Conditions, Runner
from leanconv.system.text_table import table
from leanconv.system.threads import cores

MODULES = {"pillow": "PIL", "scikit-learn": "sklearn"}  # name on PyPI -> name in Python, where they differ
# Instruction sets, as /proc/cpuinfo has them, that say how fast convolutions can be, in int8 and bfloat16 too.
FAST = r"\b(avx2|avx512f|avx_vnni|avx512_vnni|avx512_bf16|amx_int8|amx_bf16|asimd|asimddp|i8mm|bf16|sve)\b"


class Line(NamedTuple):
    found: str | None = None
    problem: str | None = None  # what is wrong or missing, and what to do


def doctor(as_json: common.Json = False) -> None:
    """Show versions, devices and runtimes of this machine, and what is missing.

    Exits 2 where something is broken that leanconv needs.

    Example: leanconv doctor
    """
    sections, broken = examine()
    if as_json:
        data = {title: {name: line._asdict() for name, line in lines.items()} for title, lines in sections.items()}
        common.print_json({"works": not broken, "broken": broken, **data})
    else:
        lines = [(title, *line) for title, section in sections.items() for line in section.items()]
        rows = [[title, name, "; ".join(filter(None, line))] for title, name, line in lines]
        print(table(["part", "name", "state"], rows, left=3))
    if broken:
        print(f"leanconv: error: {'; '.join(broken)}; install it again.", file=sys.stderr)
        raise typer.Exit(2)


def examine() -> tuple[dict[str, dict[str, Line]], list[str]]:
    """Lines by section and name, and a sentence for each thing no command works without. Nothing makes this fail."""
    versions, extras = {"python": Line(sys.version.partition(" ")[0]), "leanconv": Line(__version__)}, dict[str, Line]()
    for text in (attempt(lambda: "\n".join(metadata.requires("leanconv") or [])).found or "").splitlines():
        name, least = re.findall(r"^([\w.-]+)(?:\s*>=\s*([\d.]+))?", text)[0]
        if extra := re.search(r"extra == ['\"]([\w-]+)['\"]", text):
            said = [one and f"{name} {one}" for one in package(name, least, f"'leanconv[{extra[1]}]'")]
            both = zip(extras.get(extra[1], Line()), said, strict=True)
            extras[extra[1]] = Line(*(", ".join(filter(None, pair)) or None for pair in both))
        else:
            versions[name] = package(name, least)
    broken = [f"{name} does not work ({line.problem})" for name, line in versions.items() if line.problem]
    machine = {look.__name__: attempt(look) for look in (cpu, gpu, memory)}
    if not broken and machine["cpu"].problem:
        broken = [f"torch does not compute ({machine['cpu'].problem})"]
    places = ["cpu", "cuda"] if machine["gpu"].found else ["cpu"]
    runtimes = {name: attempt(partial(runtime, runner, places)) for name, runner in RUNTIMES.items()}
    return {"versions": versions, "machine": machine, "runtimes": runtimes, "extras": extras}, broken


def attempt(look: Callable[[], str | None]) -> Line:
    """What ``look`` returns, or how it failed: a broken install fails in every way there is."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # what libraries say on import
            warnings.simplefilter("ignore")
            return Line(look())
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, LeanconvError) else f"{type(error).__name__}: "
        return Line(problem=f"{kind}{' '.join(str(error).split())[:300].rstrip('.')}")


def package(name: str, least: str = "", source: str = "") -> Line:
    """Its version, and whether it is missing, broken or too old."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Line(problem=f"is missing: pip install {source or name}")
    # The module's own word says more, such as what torch was built for.
    own = attempt(lambda: str(getattr(import_module(MODULES.get(name, name)), "__version__", version)))
    if own.problem:
        return Line(version, f"cannot be imported ({own.problem}): pip install --force-reinstall {name}")
    have, need = ([int(number) for number in re.findall(r"\d+", one.partition("+")[0])] for one in (version, least))
    return Line(own.found, f"is older than {least}: pip install -U {name}" if have < need else None)


def runtime(runner: Runner, places: list[str]) -> str:
    """Where it runs; refused where that is nowhere."""
    import torch

    asked = {place: Conditions(device=torch.device(place)) for place in places}
    problems = {place: attempt(partial(runner.refuse, torch.nn.Identity(), asked[place])).problem for place in asked}
    able = [place for place, problem in problems.items() if not problem]
    if not able:
        raise LeanconvError(problems[places[-1]])
    return ": ".join(filter(None, [f"on {' and '.join(able)}", attempt(runner.details).found]))


def cpu() -> str:
    """Fails where a convolution or an eigenvalue problem does: every run is made of them."""
    import torch

    from leanconv.runtimes.bench.machine import cpu_name

    torch.nn.functional.conv2d(torch.ones(1, 2, 4, 4), torch.ones(3, 2, 3, 3))
    torch.linalg.eigh(torch.eye(3, dtype=torch.float64))
    info = Path("/proc/cpuinfo")
    known = dict.fromkeys(re.findall(FAST, info.read_text())) if info.exists() else {}
    return ", ".join([cpu_name(), f"cores: {cores()}", f"threads of torch: {torch.get_num_threads()}", *known])


def gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise LeanconvError(f"none found; torch is built {built}")
    every = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return "; ".join(f"{x.name}, capability {x.major}.{x.minor}, {x.total_memory / 1e9:.1f} GB" for x in every)


def memory() -> str:
    from leanconv.calibrate.memory import free_host

    return f"{free_host() / 1e9:.1f} GB free; a run stays within half of that"
