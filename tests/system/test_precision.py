"""Settings of cuDNN: read and changed in torch's older way and, where the user took that, in its newer one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import leanconv
from leanconv.system.precision import chosen_kernels, exact_products, tf32
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images

cudnn = torch.backends.cudnn
by_operation = pytest.mark.skipif(not hasattr(cudnn, "conv"), reason="this torch has no settings by operation")


@pytest.fixture
def exact_convolutions() -> Iterator[None]:
    """The user wants float32 convolutions exact and says nothing of the rest."""
    before = cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    yield
    cudnn.conv.fp32_precision = before  # type: ignore[attr-defined]


def test_products_are_exact_inside_the_block_only() -> None:
    before = cudnn.allow_tf32
    with cudnn.flags(enabled=True, allow_tf32=True):
        assert tf32()
        with exact_products():
            assert not tf32()
        assert tf32()
    assert cudnn.allow_tf32 == before


def test_kernels_are_chosen_inside_the_block_only() -> None:
    before = cudnn.benchmark, cudnn.deterministic
    with chosen_kernels(benchmark=not before[0], deterministic=not before[1]):
        assert (cudnn.benchmark, cudnn.deterministic) == (not before[0], not before[1])
    assert (cudnn.benchmark, cudnn.deterministic) == before


@by_operation
@pytest.mark.parametrize("refine", ["closed-form", "distill"])
def test_a_network_is_accelerated_whatever_way_precision_was_set(exact_convolutions: None, refine: str) -> None:
    with pytest.raises(RuntimeError):
        _ = cudnn.allow_tf32
    assert not tf32()
    with exact_products():
        assert not tf32()
    way = leanconv.Distill(steps=2) if refine == "distill" else refine
    result = leanconv.accelerate(plain_network(), smooth_images(30, 16), 2.0, refine=way, samples=500, progress=False)
    assert result.speedup >= 2
    assert cudnn.conv.fp32_precision == "ieee"  # type: ignore[attr-defined]
