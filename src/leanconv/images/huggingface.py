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
# Usual names of columns, for datasets whose types leave a choice.
IMAGE_NAMES = ("image", "img")
LABEL_NAMES = ("label", "fine_label")


@dataclass(frozen=True)
class Row(Picture):
    """A picture in a row of a dataset, read when it is needed, in any process."""

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
    one = all((folder / name).is_file() for name in ("dataset_info.json", "state.json"))
    return one or (folder / "dataset_dict.json").is_file()


def dataset_pictures(spec: str) -> list[Picture]:
    """``hf:NAME`` or ``hf:NAME:SPLIT``, both as ``load_dataset`` takes them; or a folder that ``save_to_disk`` wrote,
    of one split."""
    try:
        library: Any = importlib.import_module("datasets")
    except ImportError:
        raise LeanconvError(f"{spec!r} is a Hugging Face dataset, which needs: pip install datasets.") from None
    try:
        rows = _rows(library, spec)
    except LeanconvError:
        raise
    except Exception as error:  # the hub, the disk, the dataset's own files: anything can be wrong
        said = " ".join(str(error).split())[:200]
        raise LeanconvError(
            f"{spec!r} could not be loaded ({type(error).__name__}: {said}); give hf:NAME:SPLIT of a dataset of "
            "images, or a folder that save_to_disk wrote."
        ) from None
    image, label = _columns(rows.features, spec)
    rows = rows.with_format(None).select_columns([image] if label is None else [image, label])
    if isinstance(rows.features[image], library.Image):
        rows = rows.cast_column(image, library.Image(decode=False))
    labels = [None] * len(rows) if label is None else rows.select_columns([label])[:][label]
    # The hub's test splits have -1 where the class is secret.
    classes = [None if label in (None, -1) else str(label) for label in labels]
    return [
        Row(spec, f"{spec}/{index:08}", name, rows=rows, row=index, column=image) for index, name in enumerate(classes)
    ]


def _rows(library: Any, spec: str) -> Any:
    if spec.startswith(PREFIX):
        name, _, split = spec.removeprefix(PREFIX).partition(":")
        split = split or _only(library.get_dataset_split_names(name), spec, f"hf:{name}:")
        return library.load_dataset(name, split=split)
    rows = library.load_from_disk(spec)
    return rows[_only(list(rows), spec, f"{spec}/")] if isinstance(rows, dict) else rows


def _only(splits: list[str], spec: str, before: str) -> str:
    if len(splits) != 1:
        raise LeanconvError(f"{spec!r} has the splits {listing(splits)}; name one, for example {before}{splits[-1]}.")
    return splits[0]


def _columns(features: Mapping[str, Any], spec: str) -> tuple[str, str | None]:
    """The columns of the pictures and of their classes: by type, and by name where several have that type."""
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    images = [name for name, kind in kinds.items() if kind == "Image"]
    image = _preferred(images or [name for name in IMAGE_NAMES if name in kinds], IMAGE_NAMES)
    if image is None:
        raise LeanconvError(
            f"{spec!r} has the columns {listing(kinds)}, of which it is not clear which holds the images; rename that "
            "to 'image'."
        )
    labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    return image, _preferred(labels or [name for name in LABEL_NAMES if kinds.get(name) == "Value"], LABEL_NAMES)


def _preferred(names: list[str], known: tuple[str, ...]) -> str | None:
    only = names[0] if len(names) == 1 else None
    return next((name for name in known if name in names), only)
