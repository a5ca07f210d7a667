"""Where both networks have the same responses."""

from __future__ import annotations

from collections.abc import Sequence

from leanconv.errors import whole
from leanconv.forms.replace import Change


def places_of(changes: Sequence[Change], wanted: int | None) -> list[str]:
    """So many of the replaced layers, evenly, the last among them; None: all that have their response."""
    there = [change.batch_norm or change.name for change in changes if not change.open]
    count = len(there) if wanted is None else min(whole("features", wanted, 0), len(there))
    return [there[round((number + 1) * len(there) / count) - 1] for number in range(count)]
