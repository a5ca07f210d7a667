"""torch.export's ``.pt2``: tried in a Python process of its own, where leanconv cannot be imported."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from leanconv.runtimes.export.file_name import new_file
from leanconv.runtimes.export.program import Written, freest, prepared, quiet, shape_of, traced
from leanconv.runtimes.export.trial import Failed, compare, inputs, said, tensors

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


def to_pt2(model: nn.Module, example: Tensor, path: str | Path) -> Path:
    """Write ``model`` to a new file ``path`` (.pt2), which ``torch.export.load(path).module()`` runs without leanconv.

    ``example``: a batch of images of the usual size. Device and dtype stay the network's. The batch is free and, where
    the network allows, height and width are.
    """
    return write_pt2(model, example, Path(path)).path


def write_pt2(model: nn.Module, example: Tensor, path: Path) -> Written:
    """``to_pt2``, with what is known about the file."""
    with new_file(path, "pt2") as part:
        network, example = prepared(model, example)

        def attempt(free: dict[int, str]) -> Written:
            program = traced(network, example, free)
            tried = inputs(network, example, free)
            module = program.module()
            # Here first: where axes turn out not to be free, another process need not find out.
            compare(network, lambda x: tensors(module(x)), tried)
            try:
                with quiet():
                    torch.export.save(program, part)
            except OSError:
                raise
            except Exception as error:
                raise Failed(f"torch.export cannot save it ({said(error)})") from error
            answers = iter(_elsewhere(part, tried))
            return Written(
                path=path,
                format="pt2",
                input=shape_of(example, free),
                dtype=str(example.dtype).removeprefix("torch."),
                checked=tuple(tuple(x.shape) for x in tried),
                difference=compare(network, lambda x: next(answers), tried),
            )

        return freest(example, "the .pt2 file", attempt)


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
