"""The end of a run: what the accelerated network does on images that nothing was fitted to."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn

from leanconv.calibrate.batches import CUT, Batch, take
from leanconv.calibrate.streams import Streams, drawn
from leanconv.evaluation.held_out import Differences, differences, together
from leanconv.result import HeldOut

# Images of those the network was made with, where none were held out.
SEEN = 32

log = logging.getLogger("leanconv")


def check(original: nn.Module, accelerated: nn.Module, held_out: list[Any], streams: Streams) -> HeldOut | None:
    """Both networks, on the device, on the images ``held_out`` or, where there are none, on a few others. It fails no
    run: where outputs cannot be compared a warning says why. Every process looks at its own share."""
    team, trouble = streams.team, "there is nothing to compare in their outputs"
    seen = not any(team.all_gather(bool(held_out)))
    found: Differences | None = None
    try:
        batches = drawn(streams, -(-SEEN // team.world)) if seen else _batches(held_out, streams)
        found = differences(original, accelerated, batches, streams.device, streams.seed)
    except Exception as error:
        trouble = str(error) or type(error).__name__
    everybody = [one for one in team.all_gather(found) if one is not None]
    result = together(everybody, seen=seen) if len(everybody) == team.world else None
    if result is None and team.is_main:
        log.warning("the accelerated network was not compared with the original: %s.", trouble.rstrip("."))
    return result


def _batches(held_out: list[Any], streams: Streams) -> Iterable[Batch]:
    """Of the size that suits the network, as far as they are tensors of one shape."""
    if not held_out:
        return []
    batches = take(iter(held_out))
    batches.join(streams.batches.largest or CUT)
    return batches
