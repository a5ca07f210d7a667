"""What the output feels of every layer: one of them approximated at a time, in the otherwise original network."""

from leanconv.ranks.sensitivity.measure import feel

__all__ = ["feel"]
