"""Which sites the user wants left alone."""

from __future__ import annotations

from collections.abc import Collection

from leanconv.errors import unknown_name
from leanconv.network import reasons
from leanconv.network.sites import Site, Survey


def apply_skip(
    skip: Collection[str] | None,
    found: Survey,
    sites: dict[str, Site],
    skipped: dict[str, str],
    *,
    named: Collection[str],
) -> None:
    """Move the layers of ``skip`` from ``sites`` to ``skipped``; None means the first convolution, unless ``named``."""
    known = [layer.name for layer in found.layers]
    if skip is None:
        if found.first in sites and found.first not in named:
            del sites[found.first]
            skipped[found.first] = reasons.FIRST
        return
    for name in skip:
        if name not in known and name not in skipped:
            raise unknown_name(name, known, what="layer", where="skip")
        if sites.pop(name, None) is not None:
            skipped[name] = reasons.ASKED


def in_order(skipped: dict[str, str], found: Survey) -> dict[str, str]:
    """By order of execution, layers that did not run last."""
    order = {layer.name: number for number, layer in enumerate(found.layers)}
    return dict(sorted(skipped.items(), key=lambda item: order.get(item[0], len(order))))
