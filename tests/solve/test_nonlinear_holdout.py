"""Fits judged by samples they were not made to: how far to trust the samples, and when to stop."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import leanconv
from leanconv.solve import ResponseSpace, activation, nonlinear, parted, reduced_rank, unseen
from leanconv.solve.moments import Sums
from leanconv.solve.nonlinear import Descent
from leanconv.solve.nonlinear_holdout import WEIGHT
from leanconv.solve.reduced_rank import Regressor
from leanconv.solve.ridge import SHARES, strength
from tests.support.deep_responses import error, layer

relu = activation("relu")


def test_the_share_is_the_best_of_all_by_regression_one_by_one() -> None:
    chosen = set()
    for images, noise in itertools.product((16, 64, 512), (0.1, 1.0, 10.0)):
        target, y = layer(images, noise=noise)
        fitted, held = parted(len(y), images, alike=True)
        filters = torch.randn(24, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        prior = filters @ filters.T
        found = strength(*(Sums.of(target[part], y[part], y[part]) for part in (fitted, held)), prior)
        errors = {}
        for share in (0.0, *SHARES):
            space = ResponseSpace(prior, None, share=share)
            by_hand = reduced_rank(target[fitted], y[fitted], 24, space=space)
            errors[share] = float((by_hand(y[held]) - target[held]).square().sum())
        assert errors[found] == pytest.approx(min(errors.values()), rel=1e-6)
        chosen.add(found)
    assert len(chosen) >= 4  # it depends on the samples


def test_pseudo_samples_of_a_share_are_a_ridge_towards_the_layer_as_it_is() -> None:
    target, y = layer(64)
    previous = None
    for share in (0.0, 1e-3, 0.1, 10.0, 1e6):
        space = ResponseSpace(torch.eye(24, dtype=torch.float64), None, share=share)
        fitted = reduced_rank(target, y, 24, space=space)
        away = float((fitted.p @ fitted.q.T - torch.eye(24)).norm())
        assert previous is None or away < previous
        previous = away
    assert previous is not None
    assert previous < 1e-4


@pytest.mark.parametrize("cut", [1, 77, 599])
def test_the_sums_of_two_parts_are_those_of_the_whole(cut: int) -> None:
    target, y = layer(20)
    one, two = (Sums.of(target[part], y[part], y[part]) for part in (slice(cut), slice(cut, 600)))
    joined, whole = one.joined(two), Sums.of(target, y, y)
    assert joined.moments.count == whole.moments.count
    for found, wanted in (
        (joined.moments.mean, whole.moments.mean),
        (joined.moments.scatter, whole.moments.scatter),
        (joined.by_x, whole.by_x),
        (joined.z_mean, target.mean(0)),
    ):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("images", [40, 80])
def test_of_few_images_it_learns_less_noise_than_the_papers_solver(images: int) -> None:
    target, y = layer(images, own=0.2, noise=3.0)
    fresh_target, fresh_y = layer(400, own=0.2, noise=3.0, seed=9)
    stopped = unseen(target, y, 8, relu, parts=parted(len(y), images, alike=True))
    paper = nonlinear(target, y, 8, relu)
    assert error(paper.map, target, y) < error(stopped.map, target, y)  # on its own samples
    assert error(stopped.map, fresh_target, fresh_y) < 0.95 * error(paper.map, fresh_target, fresh_y)


def test_of_many_images_it_is_as_good() -> None:
    target, y = layer(2000)
    fresh_target, fresh_y = layer(400, seed=9)
    stopped = unseen(target, y, 8, relu, parts=parted(len(y), 2000, alike=True))
    paper = nonlinear(target, y, 8, relu)
    assert stopped.iterations >= 10
    assert error(stopped.map, fresh_target, fresh_y) < 1.02 * error(paper.map, fresh_target, fresh_y)


def test_it_stops_where_the_error_of_the_samples_held_out_is_least() -> None:
    target, y = layer(40)
    fitted, held = parts = parted(len(y), 40, alike=True)
    found = unseen(target, y, 8, relu, parts=parts)
    assert found.iterations == min(range(len(found.errors)), key=found.errors.__getitem__)
    assert 0 < found.iterations < len(found.errors) - 1
    space = ResponseSpace(torch.eye(24, dtype=torch.float64), None, share=found.share)
    linear = reduced_rank(target[fitted], y[fitted], 8, space=space)
    assert found.errors[0] == pytest.approx(error(linear, target[held], y[held]), rel=1e-9)


@pytest.mark.parametrize("adds", [False, True])
def test_what_is_returned_is_fitted_to_all_samples_as_was_chosen(adds: bool) -> None:
    target, y = layer(40)
    addend = 0.3 * torch.randn(y.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    target = target + addend if adds else target
    found = unseen(target, y, 8, relu, parts=parted(len(y), 40, alike=True), addend=addend if adds else None)
    space = ResponseSpace(torch.eye(24, dtype=torch.float64), None, share=found.share)
    sums = Sums.of(target - addend if adds else target, y, y)
    regressor = Regressor.with_moments(sums.moments, y, space)
    by_hand = Descent(target, y, 8, relu, regressor, sums, addend=addend if adds else None)
    for step in range(found.iterations):
        by_hand.sweep(WEIGHT, measure=False)
        by_hand.advance(exact=step == found.iterations - 1)
    assert found.iterations > 0
    torch.testing.assert_close(found.map(y), by_hand.current(y))


def test_a_ridge_does_not_decide_which_directions_a_rank_is_worth() -> None:
    """By the book: M^ with the ridge, then the leading directions of M^ y of the responses there are."""
    target, y = layer(64)
    prior = torch.diag(torch.logspace(2, -2, 24, dtype=torch.float64))  # other directions than those of y
    space = ResponseSpace(prior, None, share=3.0)
    found = reduced_rank(target, y, 5, space=space)
    centred, wanted = y - y.mean(0), target - target.mean(0)
    scatter = centred.T @ centred
    ridge = 3.0 * scatter.diagonal().mean() * prior / prior.diagonal().mean()
    full = torch.eye(24) + (wanted - centred).T @ centred @ torch.linalg.inv(scatter + ridge)
    u = torch.linalg.svd((centred @ full.T).T, full_matrices=False).U[:, :5]
    # Up to the few pseudo-samples there are in any case.
    torch.testing.assert_close(found(y), centred @ (u @ u.T @ full).T + target.mean(0), rtol=1e-3, atol=1e-3)


def test_without_an_activation_it_is_a_ridge_regression_on_all_samples() -> None:
    target, y = layer(128)
    linear = unseen(target, y, 24, None, parts=parted(len(y), 128, alike=True))
    space = ResponseSpace(torch.eye(24, dtype=torch.float64), None, share=linear.share)
    torch.testing.assert_close(linear.map(y), reduced_rank(target, y, 24, space=space)(y))
    assert linear.iterations == 0
    assert linear.errors == ()


@pytest.mark.parametrize("kind", ["symmetric", "shortcut", "inputs", "narrow", "float32"])
def test_every_kind_of_site_is_fitted(kind: str) -> None:
    target, y = layer(60)
    g = torch.Generator().manual_seed(5)
    parts = parted(len(y), 60, alike=True)
    addend, space = None, None
    x = y
    if kind == "symmetric":
        target = y
    if kind == "shortcut":
        addend = torch.randn(len(y), 24, generator=g, dtype=torch.float64)
        target = target + addend + 0.1
    if kind == "inputs":
        x = torch.randn(len(y), 30, generator=g, dtype=torch.float64)
        horizontal = torch.randn(24, 10, 1, 3, generator=g, dtype=torch.float64)
        y = x @ horizontal.flatten(1).T
        target = y + 0.3 * torch.randn(len(y), 24, generator=g, dtype=torch.float64) + x[:, :1]
        space = ResponseSpace.behind(x, horizontal, torch.randn(10, 5, generator=g))
    if kind == "narrow":
        filters = torch.randn(24, 9, generator=g, dtype=torch.float64)
        x = y = y[:, :9] @ filters.T
        target = y + 0.1 * torch.randn(len(y), 9, generator=g, dtype=torch.float64) @ filters.T
        space = ResponseSpace.of(filters)
    if kind == "float32":
        target, x = target.float(), y.float()
        y = x
    target = y if kind == "symmetric" else target
    found = unseen(target, y, 6, relu, parts=parts, addend=addend, space=space)
    assert found.map.p.dtype == y.dtype

    def squared(fitted) -> float:
        v = fitted(x) if addend is None else fitted(x) + addend
        return float((relu(v) - relu(target)).double().square().sum())

    wanted = target if addend is None else target - addend
    linear = reduced_rank(wanted, y, 6, space=space)
    assert squared(found.map) < squared(linear)
    assert found.share == 0.0 or kind != "symmetric"
    twice = unseen(target, y, 6, relu, parts=parts, addend=addend, space=space)
    assert torch.equal(twice.map.q, found.map.q)


@pytest.mark.parametrize("spoil", ["dead", "constant", "nothing"])
def test_what_never_varies_does_no_harm(spoil: str) -> None:
    target, y = layer(16)
    if spoil == "dead":
        y[:, :3] = target[:, :3] = 0.0
    if spoil == "constant":
        y[:] = y[0]
    if spoil == "nothing":
        y, target = torch.zeros_like(y), torch.zeros_like(y)
    prior = torch.zeros(24, 24, dtype=torch.float64)
    for space in (None, ResponseSpace(prior, None)):
        for r in (relu, None):
            found = unseen(target, y, 8, r, parts=parted(len(y), 16, alike=True), space=space)
            assert torch.isfinite(found.map(y)).all()


def test_parts_of_rows_that_were_kept() -> None:
    parts = parted(400, 40, alike=True)
    kept = torch.arange(0, 400, 3)
    few = parts.at(kept, 400)
    assert set(kept[few.fitted].tolist()) == set(kept.tolist()) & set(parts.fitted.tolist())
    assert set(kept[few.held].tolist()) == set(kept.tolist()) & set(parts.held.tolist())


class Head(nn.Module):
    """Layers that run on two maps of every image, as a detector's do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 24, 3, padding=1)
        self.shared, self.last = nn.Conv2d(24, 24, 3, padding=1), nn.Conv2d(24, 24, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        levels = [x, nn.functional.avg_pool2d(x, 2)]
        return torch.cat([self.last(self.shared(level).relu()).relu().flatten(1) for level in levels], 1)


@pytest.mark.parametrize(
    ("samples", "refine", "tolerance"),
    [(3000, "none", 1e-4), (3000, "closed-form", 0.01), ("auto", "closed-form", 0.01)],
)
def test_how_the_images_are_cut_into_batches_does_not_matter(samples: object, refine: str, tolerance: float) -> None:
    """Or little: the patches that show how to split a layer on several maps are thinned batch by batch."""
    torch.manual_seed(0)
    model, images = Head().eval(), pictures(40, 1)
    results = [
        leanconv.accelerate(
            model, list(images.split(size)), 2.0, skip=[], samples=samples, progress=False, refine=refine
        )
        for size in (40, 16, 5)
    ]
    assert any(layer.name == "shared" for layer in results[0].layers)
    with torch.no_grad():
        whole, *others = [result.model(images) for result in results]
    for other in others:
        assert float((other - whole).norm() / whole.norm()) < tolerance


def test_seven_images_are_too_few_to_hold_one_out() -> None:
    assert parted(700, 7, alike=True) is None
    assert parted(700, 8, alike=True) is not None
    assert parted(7, 8, alike=True) is None


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for c, d in ((3, 24), (24, 32), (32, 32), (32, 32)):
        layers += [nn.Conv2d(c, d, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten()).eval()


def pictures(count: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return nn.functional.interpolate(torch.randn(count, 3, 4, 4, generator=g), scale_factor=4, mode="bilinear")


def test_a_network_fitted_to_few_images_is_closer_to_the_original_on_others() -> None:
    model, others = network(), pictures(200, 2)
    fits = {
        refine: leanconv.accelerate(model, pictures(10, 1), 2.0, progress=False, refine=refine, ranks="energy")
        for refine in ("none", "closed-form")
    }
    with torch.no_grad():
        wanted = model(others)
        loss = {refine: float((fit.model(others) - wanted).square().mean()) for refine, fit in fits.items()}
    assert loss["closed-form"] < 0.8 * loss["none"]
    assert fits["closed-form"].macs_after == fits["none"].macs_after


@pytest.mark.parametrize("solver", ["linear", "nonlinear"])
def test_where_there_is_nothing_to_gain_little_is_lost(solver: str) -> None:
    """Narrow layers of many alike positions: no noise to learn."""
    model, others = network(), pictures(200, 2)
    plain, refined = (
        leanconv.accelerate(model, pictures(10, 1), 2.0, "channel", solver=solver, progress=False, refine=refine)
        for refine in ("none", "closed-form")
    )
    with torch.no_grad():
        wanted = model(others)
        loss = [float((fit.model(others) - wanted).square().mean()) for fit in (plain, refined)]
    assert loss[1] < 1.05 * loss[0]


def test_the_linear_fits_share_is_weakened_where_there_is_more_to_change() -> None:
    """The input is right, so that a linear fit is best left alone; a low rank through a ReLU wants to be fitted."""
    y, _ = layer(600)
    target = y + 0.02 * torch.randn(y.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    parts = parted(len(y), 600, alike=True)
    found, linear = (unseen(target, y, 6, r, parts=parts) for r in (relu, None))
    assert linear.share > 0.01
    assert found.share < linear.share
    assert min(found.errors) < 0.96 * found.errors[0]


def test_with_fewer_images_than_can_be_parted_the_paper_is_followed() -> None:
    model, few = network(), pictures(7, 1)
    plain, refined = (
        leanconv.accelerate(model, few, 3.0, "channel", progress=False, refine=refine, ranks="energy")
        for refine in ("none", "closed-form")
    )
    with torch.no_grad():
        assert torch.equal(plain.model(few), refined.model(few))
