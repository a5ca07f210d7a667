"""The six methods of the paper's comparison, as arguments of ``accelerate``, each adding one idea to those before."""

from __future__ import annotations

from typing import Any

PAPER = {"refine": "none"}  # its own fit, not leanconv's default
METHODS: dict[str, dict[str, Any]] = {
    "Jaderberg": PAPER | {"scheme": "spatial", "ranks": "uniform"},
    "linear, symmetric": PAPER | {"scheme": "channel", "ranks": "uniform", "solver": "linear", "asymmetric": False},
    "nonlinear, symmetric": PAPER | {"scheme": "channel", "ranks": "uniform", "asymmetric": False},
    "nonlinear, asymmetric": PAPER | {"scheme": "channel", "ranks": "uniform"},
    "+ rank selection": PAPER | {"scheme": "channel", "ranks": "energy"},
    "3d": PAPER | {"scheme": "3d", "ranks": "energy"},
}
