"""Pictures of Hugging Face datasets, where the ``datasets`` package is installed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leanconv.errors import LeanconvError, listing
from leanconv.images.picture import Picture

PREFIX = "hf:"
# Columns by the names the hub's datasets use, where their types leave a choice.
IMAGE_NAMES = ("image", "img")
LABEL_NAMES = ("label", "fine_label")


@dataclass(frozen=True)
class Row(Picture):
    """A picture in a row of a dataset; rows are read when they are needed, in any process."""

    rows: Any = field(default=None, repr=False, compare=False)
    row: int = 0
    column: str = ""

    def read(self) -> bytes:
        value = self.rows[self.row][self.column]
        if not isinstance(value, dict):
            return bytes(value)
        return value["bytes"] if value["bytes"] is not None else Path(value["path"]).read_bytes()


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote ``folder``."""
    return (folder / "dataset_dict.json").is_file() or all(
        (folder / name).is_file() for name in ("dataset_info.json", "state.json")
    )


def dataset_pictures(spec: str) -> list[Picture]:
    """``hf:NAME`` or ``hf:NAME:SPLIT``, with what ``load_dataset`` takes for a name and a split; or a folder of a
    dataset, or of the only split of several, that ``save_to_disk`` wrote."""
    library = _library(spec)
    try:
        if spec.startswith(PREFIX):
            name, _, split = spec.removeprefix(PREFIX).partition(":")
            split = split or _only(library.get_dataset_split_names(name), spec, f"hf:{name}:")
            rows = library.load_dataset(name, split=split)
        else:
            rows = library.load_from_disk(spec)
            if isinstance(rows, dict):
                rows = rows[_only(list(rows), spec, f"{spec}/")]
    except LeanconvError:
        raise
    except Exception as error:  # the hub, the disk, the dataset's own files: anything can be wrong
        said = " ".join(str(error).split())[:200]
        raise LeanconvError(
            f"{spec!r} could not be loaded ({type(error).__name__}: {said}); give hf:NAME:SPLIT of a dataset of "
            "images, or a folder that save_to_disk wrote."
        ) from None
    return _pictures(library, rows, spec)


def _library(spec: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError:
        raise LeanconvError(f"{spec!r} is a Hugging Face dataset, which needs: pip install datasets.") from None


def _only(splits: list[str], spec: str, before: str) -> str:
    if len(splits) != 1:
        raise LeanconvError(f"{spec!r} has the splits {listing(splits)}; name one, for example {before}{splits[-1]}.")
    return splits[0]


def _pictures(library: Any, rows: Any, spec: str) -> list[Picture]:
    image, label = _columns(rows.features, spec)
    rows = rows.with_format(None).select_columns([image] if label is None else [image, label])
    if isinstance(rows.features[image], library.Image):
        rows = rows.cast_column(image, library.Image(decode=False))
    labels = [None] * len(rows) if label is None else rows.select_columns([label])[:][label]
    # The hub's test splits have -1 where the class is kept secret.
    classes = [None if label in (None, -1) else str(label) for label in labels]
    return [
        Row(spec, f"{spec}/{number:08}", name, rows=rows, row=number, column=image)
        for number, name in enumerate(classes)
    ]


def _columns(features: Mapping[str, Any], spec: str) -> tuple[str, str | None]:
    """The columns of the pictures and of their classes: by type, and by name where that leaves a choice."""
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    images = [name for name, kind in kinds.items() if kind == "Image"]
    image = _chosen(images or [name for name in IMAGE_NAMES if name in kinds], IMAGE_NAMES)
    if image is None:
        raise LeanconvError(
            f"{spec!r} has the columns {listing(kinds)}, of which it is not clear which holds the images; rename that "
            "to 'image'."
        )
    labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    return image, _chosen(labels or [name for name in LABEL_NAMES if kinds.get(name) == "Value"], LABEL_NAMES)


def _chosen(names: list[str], known: tuple[str, ...]) -> str | None:
    preferred = [name for name in known if name in names]
    if preferred:
        return preferred[0]
    return names[0] if len(names) == 1 else None
