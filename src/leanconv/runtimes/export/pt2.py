"""torch.export's ``.pt2``: tried in a Python process of its own, where leanconv cannot be imported."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from leanconv.runtimes.export.program import prepared, quiet, traced
from leanconv.runtimes.export.trial import Failed, compare, error_text, tensors

# Python started with -I finds neither the user's files nor, with this, leanconv: what loads here loads in plain torch.
ELSEWHERE = """
import sys
sys.modules["leanconv"] = None
import torch
from torch.utils import _pytree
program, inputs, answers, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
network = torch.export.load(program).module()
with torch.no_grad():
    found = [_pytree.tree_leaves(network(x)) for x in torch.load(inputs, weights_only=True)]
torch.save([[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] for leaves in found], answers)
"""


def prepare(model: nn.Module, example: Tensor, device: torch.device | None, check: bool) -> tuple[nn.Module, Tensor]:
    return prepared(model, example, device=device)


def write(
    network: nn.Module, example: Tensor, free: dict[int, str], file: Path, tried: list[Tensor]
) -> Callable[[Tensor], list[Tensor]]:
    program = traced(network, example, free)
    module = program.module()
    # Compared here first: where axes turn out not to be free, another process need not find out.
    compare(network, lambda x: tensors(module(x)), tried)
    try:
        with quiet():
            torch.export.save(program, file)
    except OSError:
        raise
    except Exception as error:
        raise Failed(f"torch.export cannot save it ({error_text(error)})") from error
    answers = iter(_elsewhere(file, tried) if tried else [])
    return lambda x: next(answers)


def _elsewhere(program: Path, tried: list[Tensor]) -> list[list[Tensor]]:
    """What the saved program answers in a process without leanconv."""
    with tempfile.TemporaryDirectory() as folder:
        given, answers = Path(folder) / "inputs.pt", Path(folder) / "answers.pt"
        torch.save(tried, given)
        command = [sys.executable, "-I", "-W", "ignore", "-c", ELSEWHERE, str(program), str(given), str(answers)]
        done = subprocess.run(
            [*command, str(torch.get_num_threads())], capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise Failed(f"plain torch does not load or run the file ({last[:200].rstrip('.')})")
        found: list[list[Tensor]] = torch.load(answers, weights_only=True)
        return found
