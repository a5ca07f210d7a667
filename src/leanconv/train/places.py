"""Where both networks have the same responses, and in which channels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leanconv.errors import whole
from leanconv.network.replace import Change


def places_of(changes: Sequence[Change], wanted: int | None) -> list[str]:
    """So many of the replaced layers, evenly, the last among them; None: all that have their response."""
    there = [_place(change) for change in changes if not change.open]
    count = len(there) if wanted is None else min(whole("features", wanted, 0), len(there))
    return [there[round((number + 1) * len(there) / count) - 1] for number in range(count)]


def kept_at(places: Sequence[str], changes: Sequence[Change], device: torch.device) -> dict[str, Tensor]:
    """Channels of the original that are there, at places where some are not."""
    pruned = {_place(change): change.kept for change in changes if change.kept is not None}
    return {place: torch.tensor(kept, device=device) for place, kept in pruned.items() if place in places}


def _place(change: Change) -> str:
    return change.batch_norm or change.name
