"""Fused kernels for factorised layers on NVIDIA GPUs.

``optimize_(model)`` puts them in place; everywhere else the same layers run as torch's own operations.
"""

from __future__ import annotations

from leanconv.kernels.availability import available
from leanconv.kernels.optimize import FusedLayer, describe, fused_layers, optimize_

__all__ = ["FusedLayer", "available", "describe", "fused_layers", "optimize_"]
