"""What the output feels of every layer: one of them approximated at a time, in the otherwise original network."""

from leanconv.sensitivity.measure import feel

__all__ = ["feel"]
