"""Several saved results beside one another: ``results`` reads them, ``text`` and ``page`` show them."""

from leanconv.report.compare.results import Comparison, Result, compare

__all__ = ["Comparison", "Result", "compare"]
