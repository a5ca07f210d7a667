"""Everything that is looked at, in order."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

from leanconv._version import __version__
from leanconv.cli.doctor_checks.line import Line, attempt
from leanconv.cli.doctor_checks.machine import devices, kernels, room, runtimes
from leanconv.cli.doctor_checks.packages import essentials, extras
from leanconv.system.text_table import table


@dataclass(frozen=True)
class Examination:
    """Lines by section; ``broken`` are sentences about what keeps leanconv from working at all."""

    sections: dict[str, list[Line]]
    broken: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        sections = {
            title: {line.name: {"found": line.found, "problem": line.problem} for line in lines}
            for title, lines in self.sections.items()
        }
        return {"works": not self.broken, "broken": list(self.broken), **sections}

    def __str__(self) -> str:
        rows = [
            [title if number == 0 else "", line.name, str(line)]
            for title, lines in self.sections.items()
            for number, line in enumerate(lines)
        ]
        # Without the heads, which say nothing here.
        return "\n".join(table(["", "", ""], rows, left=3).splitlines()[2:])


def examine() -> Examination:
    """Look at everything. Nothing that is missing or broken makes this fail."""
    own = [
        Line(name="leanconv", found=__version__),
        Line(name="python", found=f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
    ]
    libraries, broken = essentials()
    _, problem = attempt(_computing)
    if problem is not None and not broken:
        broken.append(f"torch does not compute ({problem})")
    found, problem = attempt(runtimes)
    running = [Line(name="all", problem=problem)] if found is None else found
    sections = {
        "versions": [*own, *libraries],
        "devices": devices(),
        "runtimes": running,
        "kernels": [kernels()],
        "extras": extras(running),
        "room": room(),
    }
    return Examination(sections, tuple(broken))


def _computing() -> None:
    """A convolution and an eigenvalue problem: what every run is made of."""
    import torch

    torch.nn.functional.conv2d(torch.ones(1, 2, 4, 4), torch.ones(3, 2, 3, 3))
    torch.linalg.eigh(torch.eye(3, dtype=torch.float64))
