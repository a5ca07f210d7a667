"""Horizontal filters fitted freely to what they see, in place of mixtures of the old ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import leanconv
from leanconv import LeanconvError
from leanconv.config import Options
from leanconv.solve import LowRank, ResponseSpace, nonlinear, reduced_rank
from leanconv.solve.activations import activation


def case(d: int, r: int, k: int, n: int = 600) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Filters before (r x 5), horizontal ones (d x r x 1 x k), what they see (n x (r k)), wanted responses (n x d)."""
    torch.manual_seed(0)
    before, horizontal = torch.randn(r, 5).double(), torch.randn(d, r, 1, k).double()
    inputs = torch.randn(n, r * k).double() @ torch.randn(r * k, r * k).double()
    wanted = inputs @ horizontal.flatten(1).T + 0.3 * torch.randn(n, d).double() * inputs.std()
    wanted = wanted + inputs @ torch.randn(r * k, d).double()  # what no mixture of the d filters can give
    return before, horizontal, inputs, wanted


def squared(fitted: LowRank, x: Tensor, wanted: Tensor) -> float:
    return float((fitted(x) - wanted).square().sum())


@pytest.mark.parametrize(("d", "r", "k"), [(6, 4, 3), (12, 3, 3), (9, 3, 3)])
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_free_filters_are_the_best_of_their_rank(d: int, r: int, k: int, rank: int) -> None:
    before, horizontal, inputs, wanted = case(d, r, k)
    y = inputs @ horizontal.flatten(1).T
    free = reduced_rank(wanted, y, rank, space=ResponseSpace.behind(inputs, horizontal, before))
    tied = reduced_rank(wanted, y, rank)
    assert free.q.shape == (r * k, rank)
    # By the book: regress, then keep the leading directions of what was fitted.
    centred = inputs - inputs.mean(0)
    fitted = centred @ torch.linalg.lstsq(centred, wanted - wanted.mean(0)).solution
    _, values, _ = torch.linalg.svd(fitted, full_matrices=False)
    left = (wanted - wanted.mean(0) - fitted).square().sum() + values[rank:].square().sum()
    assert squared(free, inputs, wanted) == pytest.approx(float(left), rel=1e-5)
    assert squared(free, inputs, wanted) <= squared(tied, y, wanted) * (1 + 1e-9)


def test_with_nothing_to_change_the_filters_come_back() -> None:
    before, horizontal, inputs, _ = case(6, 4, 3)
    y = inputs @ horizontal.flatten(1).T
    free = reduced_rank(y, y, 6, space=ResponseSpace.behind(inputs, horizontal, before))
    torch.testing.assert_close(free.p @ free.q.T, horizontal.flatten(1))


def test_free_filters_are_better_through_the_activation_too() -> None:
    before, horizontal, inputs, wanted = case(6, 4, 3)
    y, relu = inputs @ horizontal.flatten(1).T, activation("relu")
    free = nonlinear(wanted, y, 3, relu, space=ResponseSpace.behind(inputs, horizontal, before))
    tied = nonlinear(wanted, y, 3, relu)
    assert free.error < tied.error
    assert float((relu(free.map(inputs)) - relu(wanted)).square().sum()) == pytest.approx(free.error, rel=1e-9)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for c, d, padding in ((3, 24, 1), (24, 24, 1), (24, 32, (0, 1)), (32, 32, 1)):
        layers += [nn.Conv2d(c, d, 3, padding=padding), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten()).eval()


@pytest.mark.parametrize("stride", [1, 2])
def test_errors_fall_and_the_network_keeps_its_form(tmp_path: Path, stride: int) -> None:
    model = network()
    model[4].stride = (stride, 1)
    images = torch.randn(40, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    tied = leanconv.accelerate(model, images, 2.0, samples=4000, progress=False, refine="none", ranks="energy")
    free = leanconv.accelerate(model, images, 2.0, samples=4000, progress=False, ranks="energy")
    assert [layer.ranks for layer in free.layers] == [layer.ranks for layer in tied.layers]
    assert free.macs_after == tied.macs_after
    for before, after in zip(tied.layers, free.layers, strict=True):
        assert after.error <= before.error * 1.001
    assert sum(layer.error for layer in free.layers) < 0.98 * sum(layer.error for layer in tied.layers)
    unseen = torch.randn(40, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = model(unseen)
        losses = [float((result.model(unseen) - wanted).square().mean()) for result in (tied, free)]
    assert losses[1] < losses[0]
    free.save(tmp_path / "net")
    again = leanconv.storage.folder.load_result(tmp_path / "net", model)
    assert again.options.refine == "closed-form"
    with torch.no_grad():
        assert torch.equal(again.model(unseen), free.model(unseen))


@pytest.mark.parametrize(
    ("scheme", "refine"),
    [("3d", "closed-form"), ("channel", "closed-form"), ("spatial", "none")],
)
def test_it_is_the_default_where_there_is_a_fit(scheme: str, refine: str) -> None:
    assert Options.check(scheme=scheme).refine == refine
    assert Options.check(scheme=scheme, refine="none").refine == "none"


def test_full_rank_is_exact() -> None:
    model = network()
    images = torch.randn(30, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    result = leanconv.accelerate(
        model, images, ranks={"2": (72, 24), "6": (96, 32)}, progress=False, refine="closed-form"
    )
    with torch.no_grad():
        torch.testing.assert_close(result.model(images), model(images), rtol=1e-3, atol=1e-4)


def test_it_is_for_schemes_that_fit() -> None:
    with pytest.raises(LeanconvError, match=r"makes none of its kind; use scheme='3d' or 'channel'"):
        leanconv.accelerate(network(), torch.rand(2, 3, 16, 16), scheme="spatial", refine="closed-form")
    with pytest.raises(LeanconvError, match="refine='all' is not known"):
        leanconv.accelerate(network(), torch.rand(2, 3, 16, 16), refine="all")
