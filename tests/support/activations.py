"""Parameters that activations are tested with, by the names of ``leanconv.solve.activations``."""

from __future__ import annotations

import torch

PARAMETERS = {
    "leaky_relu": {"slope": 0.1},
    "prelu": {"slope": torch.tensor([0.25, 0.0, 1.0, -0.3])},
    "hardtanh": {"low": -0.5, "high": 1.5},
    "elu": {"alpha": 0.7},
    "softplus": {"beta": 0.8, "threshold": 2.0},  # so low a threshold is a jump
}
