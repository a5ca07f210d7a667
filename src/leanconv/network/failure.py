"""A network that refuses what it is given, in one sentence."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from leanconv.errors import LeanconvError


def model_failed(error: Exception, batch: Any) -> LeanconvError:
    """The user's network refused a batch: say what it was given and what it said."""
    shape = tuple(batch.shape) if isinstance(batch, Tensor) else [tuple(image.shape) for image in batch[:3]]
    said = " ".join(str(error).split())[:300]
    return LeanconvError(
        f"the model raised {type(error).__name__} on a batch of shape {shape}: {said}; give images it accepts."
    )
