"""Fused kernels for factorised layers on NVIDIA GPUs.

``optimize_(model)`` puts them in place; everywhere else the same layers run as torch's own operations.
"""

from __future__ import annotations

from leanconv.kernels.availability import available
from leanconv.kernels.optimize import optimize_

__all__ = ["available", "optimize_"]
