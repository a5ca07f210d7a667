"""Folders that were written once: what loading them gives, and going on in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor, nn

import leanconv
from tests.pinned import networks
from tests.pinned.cells import CELLS, FOLDERS, WORK, Facts, digest, facts, one_thread
from tests.pinned.machine import WORKDIR

STATE = "leanconv-work.json"


def empty(name: str) -> nn.Module | None:
    """The network a folder was made from, without its weights; none where the folder says how to build it."""
    if name == "built-by-name":
        return None
    model = CELLS[FOLDERS[name]].network()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def loaded(name: str, folder: Path) -> Facts:
    return facts(leanconv.load_result(folder, model=empty(name)))


def outputs(name: str, folder: Path) -> str:
    """Digest of what the loaded network makes of images it has not seen."""
    given = (
        networks.scenes()[0]
        if name == "detector"
        else networks.images(4, 32 if name == "built-by-name" else 16, seed=9)
    )
    with one_thread(), torch.no_grad():
        found = leanconv.load(folder, model=empty(name))(given)
    tensors: dict[str, Tensor] = {"": found} if isinstance(found, Tensor) else {}
    if not tensors:
        tensors = {f"{number} {key}": value for number, image in enumerate(found) for key, value in image.items()}
    return digest(tensors)


def work_copy(folder: Path, *, finished: bool = True) -> Path:
    """The recorded workdir, as if this version had written it; unfinished: without the layer that was solved last."""
    work = Path(shutil.copytree(WORKDIR, folder / "work"))
    state = json.loads((work / STATE).read_text())
    state["basis"] |= {"leanconv": leanconv.__version__, "torch": torch.__version__}
    state["finished"] = finished
    (work / STATE).write_text(json.dumps(state))
    if not finished:
        sorted((work / "solved").iterdir())[-1].unlink()
    return work


def continued(work: Path) -> Facts:
    return facts(WORK.run(workdir=work))
