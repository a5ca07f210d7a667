"""A plan found by timing kept with the state of a run: measured again, it would be another one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leanconv.ranks import Choice
from leanconv.ranks.latency.plan import TimedPlan
from leanconv.system.atomic_files import write_whole

FILE = "plan.json"


def remembered(folder: Path | None, options: dict[str, Any], find: Callable[[], TimedPlan]) -> TimedPlan:
    """The plan an earlier run with the same ``options`` left in its work ``folder``; else a new one, left there."""
    if folder is None:
        return find()
    found = _kept(folder, options)
    if found is None:
        found = find()
        plan = {name: [choice.scheme, choice.ranks] for name, choice in found.plan.items()}
        write_whole(folder / FILE, json.dumps({"options": options, "plan": plan, "pairs": found.pairs}) + "\n")
    return found


def _kept(folder: Path, options: dict[str, Any]) -> TimedPlan | None:
    try:
        data = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if data["options"] != options:
            return None
        return TimedPlan(
            plan={name: Choice(scheme, tuple(ranks)) for name, (scheme, ranks) in data["plan"].items()},
            pairs=[(giver, taker) for giver, taker in data["pairs"]],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
