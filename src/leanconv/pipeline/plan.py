"""A plan: the form and ranks of every layer, to print, edit, save and apply."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from leanconv.config import Options
from leanconv.errors import LeanconvError, unknown_name
from leanconv.forms import FORMS, Choice, Choices
from leanconv.ranks import Candidate, Pairs, active, macs_after
from leanconv.ranks.manual import choice_by_hand
from leanconv.ranks.selector import RankSelector
from leanconv.system.atomic_files import write_whole
from leanconv.system.text_table import table

FORMAT, VERSION = "leanconv-plan", 1


class Plan(MutableMapping[str, Choice]):
    """What each layer becomes; a layer without an entry stays as it is.

    ``plan["features.5"] = (24, 40)`` sets ranks by hand, a pair (d'', d') for 3d and d' for channel, and ``del
    plan["features.5"]`` leaves a layer as it is.
    """

    def __init__(
        self,
        choices: Choices,
        pairs: Pairs,
        candidates: Mapping[str, Candidate],
        *,
        fixed: int,
        options: Options,
        selector: RankSelector | None = None,
    ):
        """``pairs``: of layers to merge. ``fixed``: MACs of the layers that count and are no candidates. ``options``:
        what the plan was made for; ``selector``: who made it, None for ranks by hand."""
        self._choices, self._pairs, self._candidates, self._fixed = dict(choices), list(pairs), candidates, fixed
        self.options, self.selector = options, selector

    def __getitem__(self, name: str) -> Choice:
        return self._choices[name]

    def __setitem__(self, name: str, ranks: Any) -> None:
        if name not in self._candidates:
            raise unknown_name(str(name), self._candidates, what="layer", where="plan")
        self._choices[name] = choice_by_hand(name, ranks, self._candidates[name].geometry, self.options.forms)

    def __delitem__(self, name: str) -> None:
        del self._choices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._choices)

    def __len__(self) -> int:
        return len(self._choices)

    @property
    def pairs(self) -> Pairs:
        """Layers of which the first one's 1 x 1 factor is taken into the second."""
        return active(self._choices, self._pairs)

    @property
    def macs(self) -> dict[str, int]:
        """Multiply-accumulates of every layer that may be replaced, once the plan is applied."""
        return macs_after(dict(self._candidates), self._choices, self.pairs)

    @property
    def speedup(self) -> float:
        """MACs before / after, of every layer that counts."""
        before = self._fixed + sum(one.cost.dense for one in self._candidates.values())
        return before / (self._fixed + sum(self.macs.values()))

    def __str__(self) -> str:
        macs, rows = self.macs, []
        for name, one in self._candidates.items():
            choice = self.get(name)
            form = "as it is" if choice is None else choice.form.name
            ranks = "" if choice is None else " x ".join(map(str, choice.ranks))
            energy = "" if choice is None or not one.spectra else f"{100 * one.energy(choice):.1f}%"
            rows.append([name, form, ranks, f"{one.cost.dense / 1e6:.2f}", f"{macs[name] / 1e6:.2f}", energy])
        heads = ["layer", "form", "ranks", "MMACs", "after", "energy"]
        return f"{table(heads, rows, left=2)}\n{self.speedup:.3f}x fewer MACs"

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "layers": {name: [choice.form.name, *choice.ranks] for name, choice in self._choices.items()},
            "pairs": [list(pair) for pair in self.pairs],
        }

    def save(self, path: str | Path) -> Path:
        """Write the plan to a JSON file, in place of what is there; ``analysis.plan(path)`` reads it."""
        path = Path(path)
        try:
            write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")
        except OSError as error:
            raise LeanconvError(f"cannot write {str(path)!r}: {error.strerror}; choose another place.") from error
        return path


def read_plan(path: Path) -> tuple[Choices, Pairs]:
    """What ``Plan.save`` wrote."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            raise ValueError("it is no plan of this version")
        choices = {name: Choice(FORMS[form], tuple(ranks)) for name, (form, *ranks) in data["layers"].items()}
        return choices, [(giver, taker) for giver, taker in data["pairs"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LeanconvError(f"{str(path)!r} is no plan ({error}); give a file that plan.save() wrote.") from None
