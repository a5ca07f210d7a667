"""The same architecture from scratch: what an accelerated network is compared with."""

from __future__ import annotations

from torch import nn

from leanconv.models import initialise
from leanconv.network.user_model import copied


def scratch(model: nn.Module, seed: int = 0) -> nn.Module:
    """A copy of ``model`` with nothing of its training left in it (see ``models.initialise``)."""
    return initialise(copied(model), seed)
