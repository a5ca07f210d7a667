"""On a CUDA device: the same answers as on the CPU, and the same bits twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import leanconv
from leanconv.network import reasons
from leanconv.solve import activation, nonlinear, parted, pca, reduced_rank, unseen
from tests.support.equality import relative
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_solvers_agree_with_the_cpu(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    y = (torch.randn(3000, 32, generator=g) @ torch.randn(32, 32, generator=g)).to(dtype)
    z = y + 0.1 * torch.randn(3000, 32, generator=g).to(dtype)
    r = activation("relu")
    for solve in (
        lambda a, b: pca(b, 8)(b),
        lambda a, b: reduced_rank(a, b, 8)(b),
        lambda a, b: nonlinear(a, b, 8, r, tolerance=None).map(b),
        lambda a, b: unseen(a, b, 8, r, parts=parted(3000, 100, alike=True)).map(b),
    ):
        here, there = solve(z, y), solve(z.cuda(), y.cuda())
        assert there.is_cuda
        assert relative(there.cpu(), here) < 2e-2


@pytest.mark.parametrize(
    ("scheme", "refine"), [("channel", "none"), ("spatial", "none"), ("3d", "none"), ("3d", "closed-form")]
)
def test_accelerate_on_the_device(scheme: str, refine: str) -> None:
    model, images = plain_network().cuda(), smooth_images()
    a, b = (leanconv.accelerate(model, images, 2.0, scheme, refine=refine, progress=False) for _ in range(2))
    assert next(a.model.parameters()).is_cuda
    assert all(torch.equal(x, y) for x, y in zip(a.model.parameters(), b.model.parameters(), strict=True))
    cpu = leanconv.accelerate(model.cpu(), images, 2.0, scheme, refine=refine, progress=False)
    assert [layer.ranks for layer in cpu.layers] == [layer.ranks for layer in a.layers]


def test_device_argument_brings_the_result_home() -> None:
    model, images = plain_network(), smooth_images()
    result = leanconv.accelerate(model, images, 2.0, device="cuda", progress=False)
    assert {p.device.type for p in result.model.parameters()} == {"cpu"}
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_a_deep_network_keeps_its_sites() -> None:
    """TF32 rounds to ten bits, and a deep network multiplies that; the trial must not take it for a difference."""
    from torchvision.models import resnet101

    torch.manual_seed(0)
    model, images = resnet101().cuda(), torch.randn(32, 3, 64, 64)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(images.cuda())
    result = leanconv.accelerate(model.eval(), images, 1.5, progress=False, samples=2000)
    assert reasons.NOT_AT_PATH not in result.skipped.values()
