"""The state of a training run in a folder: one file, replaced whole.

``state.pt`` is read with torch's safe loader (tensors, numbers and texts; nothing in it is run).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from leanconv.errors import LeanconvError
from leanconv.system.atomic_files import lock_folder, replaced

STATE = "state.pt"
PART = f"{STATE}.part"
FORMAT = "leanconv-training-3"
# Arguments of which only a digest is kept -> what the error says about them.
DIGESTS = {
    "network": "another network, or other weights; give the same again",
    "original": "another original, or none; give the same again",
    "data": "other images; give the same again",
    "validation": "other validation images, or none; give the same again",
}


class Checkpoint:
    """The locked folder of a run with these ``arguments``. Call ``close`` at the end."""

    def __init__(self, folder: str | os.PathLike[str], arguments: dict[str, Any]):
        self.folder, self.arguments = Path(folder), arguments
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LeanconvError(f"workdir={str(folder)!r} cannot be made ({error.strerror}); give another.") from None
        self._lock = lock_folder(self.folder)
        (self.folder / PART).unlink(missing_ok=True)  # left by a process that was killed
        if not (self.folder / STATE).exists() and any(self.folder.iterdir()):
            self.close()
            raise LeanconvError(
                f"workdir={str(folder)!r} holds other files and no earlier training; give a new or empty folder."
            )

    def close(self) -> None:
        os.close(self._lock)

    def load(self) -> dict[str, Any] | None:
        """The last state, or None. Refused if it is of a run with other arguments."""
        path = self.folder / STATE
        if not path.exists():
            return None
        try:
            saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch's loader can raise anything on a damaged file
            raise LeanconvError(
                f"workdir={str(self.folder)!r}: {STATE} cannot be read ({type(error).__name__}); delete the folder."
            ) from None
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            raise LeanconvError(
                f"workdir={str(self.folder)!r} was written by another version of leanconv; give another folder."
            )
        for key, value in self.arguments.items():
            known = saved["arguments"].get(key)
            if key == "augment" and isinstance(known, str):
                known = known.replace(", mix=0.0", "")  # written by versions that had this option
            if value != known:
                problem = DIGESTS.get(key, f"{key}={known!r}, but {key}={value!r} was given; give the same arguments")
                raise LeanconvError(
                    f"workdir={str(self.folder)!r} holds a training with {problem}, or another workdir."
                )
        state: dict[str, Any] = saved["state"]
        return state

    def keep(self, state: dict[str, Any]) -> None:
        try:
            with replaced(self.folder / STATE, self.folder / PART) as part, part.open("wb") as file:
                torch.save({"format": FORMAT, "arguments": self.arguments, "state": state}, file)
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise LeanconvError(
                f"cannot write to workdir={str(self.folder)!r}: {reason}; make room and start again, the checkpoint "
                "before is kept."
            ) from error
