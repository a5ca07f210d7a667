"""How far apart two tensors or two results are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leanconv.result import Accelerated
from tests.support.pictures import smooth_images


def relative(a: Tensor, b: Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


def assert_same(a: Accelerated, b: Accelerated, tolerance: float = 1e-6) -> None:
    assert [layer.ranks for layer in a.layers] == [layer.ranks for layer in b.layers]
    for x, y in zip(a.layers, b.layers, strict=True):
        assert x.error == pytest.approx(y.error, rel=tolerance)
    images = smooth_images(3, 32).to(next(a.model.parameters()))
    with torch.no_grad():
        assert relative(a.model(images), b.model(images)) <= tolerance


def assert_equal(a: Accelerated, b: Accelerated) -> None:
    assert [vars(layer) for layer in a.layers] == [vars(layer) for layer in b.layers]
    torch.testing.assert_close(a.model.state_dict(), b.model.state_dict(), rtol=0, atol=0, equal_nan=True)
