"""Times of layers kept in a file: a machine, its libraries and a target have one, whatever the network."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leanconv.errors import warn
from leanconv.forms import FORMS, Choice
from leanconv.ranks.latency.grid import Times
from leanconv.system.atomic_files import write_whole

FORMAT = "leanconv-latency"
VERSION = 1
DENSE = "dense"


def folder() -> Path:
    """LEANCONV_CACHE, or leanconv's place in the user's cache folder."""
    own = os.environ.get("LEANCONV_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leanconv"


@dataclass
class Cache:
    """What was timed under ``facts`` (machine, versions, target), by layer and form."""

    path: Path
    facts: dict[str, Any]
    layers: dict[str, Times] = field(default_factory=dict)

    @classmethod
    def opened(cls, facts: dict[str, Any]) -> Cache:
        """The file of these facts. One that cannot be read is left out with a remark, and written anew later."""
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        cache = cls(folder() / f"latency-{digest}.json", facts)
        try:
            data = json.loads(cache.path.read_text(encoding="utf-8"))
            if (data["format"], data["version"], data["facts"]) != (FORMAT, VERSION, facts):
                raise ValueError("of another version")
            cache.layers = {layer: _read(forms) for layer, forms in data["layers"].items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            warn(
                f"the times kept in {str(cache.path)!r} cannot be read ({type(error).__name__}); they are taken again."
            )
        return cache

    def times(self, layer: str) -> Times:
        return self.layers.setdefault(layer, {})

    def keep(self) -> None:
        """Written whole or not at all; where it cannot be written the run goes on."""
        layers = {layer: {_name(choice): ms for choice, ms in times.items()} for layer, times in self.layers.items()}
        data = {"format": FORMAT, "version": VERSION, "facts": self.facts, "layers": layers}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(data) + "\n")
        except OSError as error:
            warn(f"the times cannot be kept in {str(self.path)!r} ({error.strerror}); set LEANCONV_CACHE to a folder.")


def _name(choice: Choice | None) -> str:
    return DENSE if choice is None else " ".join([choice.form.name, *map(str, choice.ranks)])


def _read(forms: dict[str, float]) -> Times:
    found: Times = {}
    for name, ms in forms.items():
        form, *ranks = name.split(" ")
        if not (isinstance(ms, float) and ms > 0 and (form == DENSE or form in FORMS)):
            raise ValueError(name)
        found[None if form == DENSE else Choice(FORMS[form], tuple(map(int, ranks)))] = ms
    return found
