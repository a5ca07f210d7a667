"""Why a layer is not replaced: every value ``result.skipped`` can have."""

from __future__ import annotations

from leanconv.errors import listing

FIRST = "the first convolution, kept by default (skip=[] includes it)"
ASKED = "named in skip"
NOT_NAMED = "not named in ranks"
OUTSIDE = "outside the part asked for"
NOT_CHEAPER = "its factors would not be cheaper than the layer"
NOT_NEEDED = "kept whole by the rank selection"
NOT_SPATIAL = "no k x k filter to split (the spatial scheme needs k > 1 both ways, one group)"
UNUSED = "not used by the sample run"
USED_AGAIN = "used more than once in one run"
SHARED = "shares its weight with another layer"
DEPTHWISE = "depthwise: one input channel a filter, nothing to reduce"
TRANSPOSED = "transposed convolution"
CUSTOM = "its class has a forward of its own that is not one convolution"
NOT_REAL = "its weight is not made of floating-point numbers"
HOOKED = "carries hooks, whose work would be lost"
FUNCTION = "called as a function, not as a module"
NOT_AT_PATH = "the network reaches it other than by calling the module at its path"


def by_reason(skipped: dict[str, str], limit: int = 4) -> list[str]:
    """One line per reason, for people, with the names of its first layers."""
    layers: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        layers.setdefault(reason, []).append(name)
    return [f"{listing(names, limit)} ({reason})" for reason, names in layers.items()]
