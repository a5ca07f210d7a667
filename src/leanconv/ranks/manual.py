"""Ranks the user gives, checked."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

from leanconv.errors import LeanconvError, unknown_name
from leanconv.forms import Choice, Choices, Scheme
from leanconv.network.layers.geometry import Geometry


def by_hand(
    ranks: Mapping[str, Any], sites: Mapping[str, Geometry], skipped: Mapping[str, str], scheme: Scheme
) -> Choices:
    """``{"layer": rank}``: d' for channel, d'' for spatial, a pair (d'', d') for 3d (d' alone where k = 1). A
    ``Choice`` names the form too.

    What is asked for is done, also where the factors cost more than the layer.
    """
    plan: Choices = {}
    for name, given in ranks.items():
        if not isinstance(name, str):
            raise LeanconvError(f"ranks has the key {name!r}; give layer names as strings, for example {str(name)!r}.")
        if name in skipped:
            raise LeanconvError(f"ranks names {name!r}, which cannot be factorised: {skipped[name]}.")
        if name not in sites:
            raise unknown_name(str(name), sites, what="layer", where="ranks")
        plan[name] = choice_by_hand(name, given, sites[name], scheme)
    if not plan:
        raise LeanconvError("ranks is empty; name at least one layer, or use 'energy' or 'uniform'.")
    return plan


def choice_by_hand(name: str, given: Any, geometry: Geometry, scheme: Scheme) -> Choice:
    """The form of the scheme that has most ranks for such a layer, with the ranks given."""
    if isinstance(given, Choice):
        return checked(name, given, geometry)
    forms = scheme.applicable(geometry)
    if not forms:
        raise LeanconvError(
            f"ranks names {name!r}, whose {geometry.kernel[0]} x {geometry.kernel[1]} filters cannot be split "
            "spatially; leave it out or use scheme='channel'."
        )
    form = forms[-1]
    if len(form.axes) == 1:
        if not _whole(given):
            raise LeanconvError(f"ranks[{name!r}] is {given!r}; give a whole number of filters.")
        return checked(name, Choice(form, (int(given),)), geometry)
    values = tuple(given) if isinstance(given, (list, tuple)) else ()
    if len(values) != len(form.axes) or not all(_whole(value) for value in values):
        symbols = ", ".join(axis.symbol for axis in form.axes)
        first, *_, last = form.limits(geometry)
        raise LeanconvError(
            f"ranks[{name!r}] is {given!r}; the {form.name} scheme takes a pair ({symbols}) of whole numbers, for "
            f"example ({max(1, first // 4)}, {max(1, last // 2)})."
        )
    return checked(name, Choice(form, tuple(int(value) for value in values)), geometry)


def checked(name: str, choice: Choice, geometry: Geometry) -> Choice:
    """``choice`` if the layer allows this form and these ranks."""
    form = choice.form
    if not form.applies(geometry):
        raise LeanconvError(f"ranks[{name!r}] is {choice}, a form this layer cannot take; use another.")
    if len(choice.ranks) != len(form.axes) or not all(_whole(rank) for rank in choice.ranks):
        symbols = ", ".join(axis.symbol for axis in form.axes)
        raise LeanconvError(f"ranks[{name!r}] is {choice.ranks!r}; {form.name} takes whole numbers ({symbols}).")
    for axis, rank, limit in zip(form.axes, choice.ranks, form.limits(geometry), strict=True):
        if not 1 <= rank <= limit:
            raise LeanconvError(f"ranks[{name!r}] asks for {axis.symbol} = {rank}; this layer allows 1 to {limit}.")
    return choice


def _whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
