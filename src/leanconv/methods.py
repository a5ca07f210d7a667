"""The six methods of the paper's comparison, as arguments of ``accelerate``, each adding one idea to those before."""

from __future__ import annotations

from typing import Any

METHODS: dict[str, dict[str, Any]] = {
    "Jaderberg": {"scheme": "spatial", "ranks": "uniform"},
    "linear, symmetric": {"scheme": "channel", "ranks": "uniform", "solver": "linear", "asymmetric": False},
    "nonlinear, symmetric": {"scheme": "channel", "ranks": "uniform", "asymmetric": False},
    "nonlinear, asymmetric": {"scheme": "channel", "ranks": "uniform"},
    "+ rank selection": {"scheme": "channel", "ranks": "energy"},
    "3d": {"scheme": "3d", "ranks": "energy"},
}
