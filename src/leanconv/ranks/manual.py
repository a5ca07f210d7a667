"""Ranks the user gives, checked."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

from leanconv.errors import LeanconvError, unknown_name
from leanconv.network.layers.geometry import Geometry, Scheme
from leanconv.ranks.candidates import Choice, Plan


def by_hand(
    ranks: Mapping[str, Any], sites: Mapping[str, Geometry], skipped: Mapping[str, str], scheme: Scheme
) -> Plan:
    """``{"layer": rank}``: d' for channel, d'' for spatial, a pair (d'', d') for 3d (d' alone where k = 1).

    What is asked for is done, also where the factors cost more than the layer.
    """
    plan: Plan = {}
    for name, given in ranks.items():
        if not isinstance(name, str):
            raise LeanconvError(f"ranks has the key {name!r}; give layer names as strings, for example {str(name)!r}.")
        if name in skipped:
            raise LeanconvError(f"ranks names {name!r}, which cannot be factorised: {skipped[name]}.")
        if name not in sites:
            raise unknown_name(str(name), sites, what="layer", where="ranks")
        plan[name] = _choice(name, given, sites[name], scheme)
    if not plan:
        raise LeanconvError("ranks is empty; name at least one layer, or use 'energy' or 'uniform'.")
    return plan


def _choice(name: str, given: Any, geometry: Geometry, scheme: Scheme) -> Choice:
    if scheme == "spatial" and not geometry.splits_spatially:
        raise LeanconvError(
            f"ranks names {name!r}, whose {geometry.kernel[0]} x {geometry.kernel[1]} filters cannot be split "
            "spatially; leave it out or use scheme='channel'."
        )
    if scheme == "3d" and geometry.splits_spatially:
        values = tuple(given) if isinstance(given, (list, tuple)) else ()
        if len(values) != 2 or not all(_whole(value) for value in values):
            raise LeanconvError(
                f"ranks[{name!r}] is {given!r}; the 3d scheme takes a pair (d'', d') of whole numbers, for example "
                f"({max(1, geometry.spatial_limit // 4)}, {max(1, geometry.channel_limit // 2)})."
            )
        spatial, channel = (int(value) for value in values)
        _check(name, "d''", spatial, geometry.spatial_limit)
        _check(name, "d'", channel, geometry.channel_limit)
        return Choice("3d", (spatial, channel))
    if not _whole(given):
        raise LeanconvError(f"ranks[{name!r}] is {given!r}; give a whole number of filters.")
    if scheme == "spatial":
        _check(name, "d''", int(given), geometry.spatial_limit)
        return Choice("spatial", (int(given),))
    _check(name, "d'", int(given), geometry.channel_limit)
    return Choice("channel", (int(given),))


def _whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _check(name: str, symbol: str, rank: int, limit: int) -> None:
    if not 1 <= rank <= limit:
        raise LeanconvError(f"ranks[{name!r}] asks for {symbol} = {rank}; this layer allows 1 to {limit}.")
