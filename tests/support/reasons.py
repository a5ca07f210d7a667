"""Every reason in ``result.skipped``, in the order of their definition."""

from __future__ import annotations

from leanconv.network import reasons

ALL = tuple(value for name, value in vars(reasons).items() if name.isupper())
