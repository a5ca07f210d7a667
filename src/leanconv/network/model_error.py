"""A network that refuses what it is given, in one sentence."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from leanconv.errors import LeanconvError
from leanconv.network.function_trace import tensors


def model_failed(error: Exception, batch: Any) -> LeanconvError:
    """The user's network refused a batch: say what it was given and what it said."""
    shapes = [tuple(tensor.shape) for tensor in tensors(batch)][:3]
    shape = shapes[0] if isinstance(batch, Tensor) else shapes
    said = " ".join(str(error).split())[:300]
    return LeanconvError(
        f"the model raised {type(error).__name__} on a batch of shape {shape}: {said}; give images it accepts."
    )
