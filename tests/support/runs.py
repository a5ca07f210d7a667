"""Short runs of accelerate."""

from __future__ import annotations

import pytest
from torch import nn

import leanconv
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images


def accelerate(model: nn.Module, images, speedup: float = 2.0, **arguments):
    return leanconv.accelerate(model, images, speedup, **{"progress": False, "samples": 2000, **arguments})


@pytest.fixture(scope="module")
def accelerated() -> tuple[nn.Module, leanconv.Accelerated]:
    model = plain_network()
    return model, leanconv.accelerate(model, smooth_images(), 2, solver="linear", samples=200, progress=False)
