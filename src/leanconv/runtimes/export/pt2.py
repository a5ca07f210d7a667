"""torch.export's ``.pt2``, checked in another Python process, where leanconv cannot be imported."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from leanconv.runtimes.export.program import prepared, quiet, traced
from leanconv.runtimes.export.trial import Failed, compare, failing, tensors

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
    network: nn.Module, example: Tensor, free: dict[int, str], file: Path, inputs: list[Tensor]
) -> Callable[[Tensor], list[Tensor]]:
    program = traced(network, example, free)
    module = program.module()
    # Compared here first: where axes turn out not to be free, another process need not find out.
    compare(network, lambda x: tensors(module(x)), inputs)
    with failing("torch.export cannot save it", writes=True), quiet():
        torch.export.save(program, file)
    answers = iter(_elsewhere(file, inputs) if inputs else [])
    return lambda x: next(answers)


def _elsewhere(program: Path, inputs: list[Tensor]) -> list[list[Tensor]]:
    """What the saved program answers in a process without leanconv."""
    with tempfile.TemporaryDirectory() as folder:
        inputs_file, answers_file = Path(folder) / "inputs.pt", Path(folder) / "answers.pt"
        torch.save(inputs, inputs_file)
        arguments = map(str, (program, inputs_file, answers_file, torch.get_num_threads()))
        command = [sys.executable, "-I", "-W", "ignore", "-c", ELSEWHERE, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise Failed(f"plain torch does not load or run the file ({last[:200].rstrip('.')})")
        answers: list[list[Tensor]] = torch.load(answers_file, weights_only=True)
        return answers
