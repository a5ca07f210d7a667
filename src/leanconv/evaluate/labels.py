"""Class folders and the outputs they stand for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from leanconv.errors import LeanconvError, listing
from leanconv.images.find import Picture


class ClassIndices(dict[str, int]):
    """Folder name -> output. ``by_order``: only the alphabetical order of the folders says so, which is right only
    if there is a folder for every output."""

    by_order = False

    def check(self, outputs: int) -> None:
        """Refuse labels the network cannot have, once the number of its outputs is known."""
        if self.by_order and len(self) != outputs:
            raise LeanconvError(
                f"the data has {len(self)} class folders but the network {outputs} outputs, so their order does not "
                "say which is which; give --classes FILE, a JSON of {folder: class index}."
            )
        beyond = [f"{name}: {index}" for name, index in self.items() if not 0 <= index < outputs]
        if beyond:
            raise LeanconvError(f"class indices must be 0 to {outputs - 1}; found {listing(beyond, 3)}.")


def class_indices(pictures: Sequence[Picture], file: Path | None) -> ClassIndices:
    """From a JSON file, from folder names that are numbers, or from their alphabetical order."""
    unlabelled = [picture.name for picture in pictures if picture.label is None]
    if unlabelled:
        raise LeanconvError(
            f"{len(unlabelled)} images lie in no class folder ({listing(unlabelled, 2)}); evaluate needs a "
            "folder a class."
        )
    names = sorted({picture.label for picture in pictures if picture.label is not None})
    if file is not None:
        return _from_file(file, names)
    if all(name.isascii() and name.isdecimal() for name in names):
        return ClassIndices({name: int(name) for name in names})
    found = ClassIndices({name: index for index, name in enumerate(names)})
    found.by_order = True
    return found


def _from_file(file: Path, names: list[str]) -> ClassIndices:
    try:
        data = json.loads(file.read_text())
        given = {name: value[0] if isinstance(value, list) else value for name, value in data.items()}
    except (OSError, ValueError, AttributeError, IndexError) as error:
        raise LeanconvError(f"--classes {str(file)!r} cannot be read ({error}); give a JSON object.") from None
    missing = [name for name in names if not isinstance(given.get(name), int)]
    if missing:
        raise LeanconvError(f"--classes {str(file)!r} gives no class index for {listing(missing, 3)}.")
    return ClassIndices({name: given[name] for name in names})
