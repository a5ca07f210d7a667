"""Layers with nothing between them: the 1 x 1 factor of one goes into the 1 x 1 filters of the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import leanconv
from leanconv.network.dry_run import Trial
from leanconv.network.links import find_links
from leanconv.network.survey import survey
from tests.support.equality import relative
from tests.support.networks import settle_batch_norms
from tests.support.pictures import smooth_images


@torch.jit.script
def scripted_gate(y: Tensor) -> Tensor:
    return torch.sigmoid(y.sum(1, keepdim=True))


class Narrow(nn.Module):
    """MobileNet's linear bottleneck: wide, narrow without an activation, wide again."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda y: y) -> None:
        super().__init__()
        self.between = between
        self.stem = nn.Conv2d(3, 24, 3, padding=1)
        self.project, self.norm = nn.Conv2d(24, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.expand = nn.Conv2d(16, 32, 1, stride=2)
        self.expand_norm = nn.BatchNorm2d(32)
        self.last = nn.Conv2d(32, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.project(F.relu(self.stem(x))))
        return self.last(F.relu6(self.expand_norm(self.expand(self.between(y)))))


class Threefold(nn.Module):
    """A chain of three layers with nothing between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.c(self.b(self.a(x))))


def build(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.2)
    return settle_batch_norms(model)


def links(model: nn.Module) -> list[tuple[str, str]]:
    sample = smooth_images(2)
    found = find_links(Trial(model, sample.clone()), list(survey(model, sample.clone()).sites))
    return [(link.giver.name, link.taker.name) for link in found]


def by_hand(model: nn.Module, ranks: dict) -> leanconv.Accelerated:
    return leanconv.accelerate(
        model, smooth_images(16), ranks=ranks, scheme="channel", skip=[], progress=False, samples=3000
    )


def test_what_is_a_link() -> None:
    assert links(build(Narrow())) == [("project", "expand")]
    assert links(build(Threefold())) == [("a", "b"), ("b", "c")]


@pytest.mark.parametrize(
    "between",
    [
        F.relu,  # not linear
        lambda y: y + y.mean(),  # used twice
        lambda y: F.max_pool2d(y, 2),
        lambda y: y if y.shape[1] == 16 else y[:, :0],  # asks for the channels
        lambda y: F.pad(y, (1, 1)),
        lambda y: y * y.shape[1] ** -0.5,
        lambda y: y * scripted_gate(y),  # torch does not show what a scripted function reads
    ],
)
def test_what_is_none(between: Callable[[Tensor], Tensor]) -> None:
    assert links(build(Narrow(between))) == []


def test_somebody_looks_at_the_tensor_between() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16))
            self.point = nn.Conv2d(16, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.point(self.body(x))

    @dataclass
    class Answer:
        narrow: Tensor

    class Returns(Narrow):
        def forward(self, x: Tensor):
            y = self.norm(self.project(F.relu(self.stem(x))))
            return self.last(F.relu(self.expand(y))), Answer(y)

    net = build(Held())
    assert links(net) == [("body.0", "point")]
    net.body.register_forward_hook(lambda module, given, answer: None)
    assert links(net) == []
    assert links(build(Returns())) == []


def test_merging_is_exact_and_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fresh = build(Narrow()), smooth_images(4, seed=3)
    result = by_hand(model, {"project": 16, "expand": 16})
    assert relative(result.model(fresh), model(fresh)) <= 1e-5
    changes = {change.name: change for change in result.changes}
    assert (changes["project"].open, changes["expand"].inputs) == (True, 16)
    assert [name for name, _ in result.model.project.named_children()] == ["reduce"]
    assert survey(result.model, fresh[:1]).macs == result.macs_after
    assert (
        sum(layer.macs_after - layer.macs_before for layer in result.layers) == result.macs_after - result.macs_before
    )
    # At rank 6 the narrow end carries 6 channels instead of 16, and the answer is that of the unmerged pair.
    merged = by_hand(model, {"project": 6, "expand": 12})
    assert merged.model.expand.reduce.weight.shape == (12, 6, 1, 1)
    assert merged.model.expand.weight.shape == model.expand.weight.shape
    monkeypatch.setattr("leanconv.pipeline.prepare.find_links", lambda *_: [])
    assert relative(merged.model(fresh), by_hand(model, {"project": 6, "expand": 12}).model(fresh)) <= 1e-5
    alone = by_hand(model, {"project": 6})
    assert [name for name, _ in alone.model.project.named_children()] == ["reduce", "expand"]


def test_a_chain_of_three() -> None:
    model, fresh = build(Threefold()), smooth_images(4, seed=3)
    result = by_hand(model, {"a": 16, "b": 16, "c": 16})
    assert relative(result.model(fresh), model(fresh)) <= 1e-5
    assert [change.open for change in result.changes] == [True, True, False]
    assert survey(result.model, fresh[:1]).macs == result.macs_after


def test_a_layer_kept_whole_takes_the_factor_in(tmp_path) -> None:
    """What the plan leaves dense may still get fewer inputs; it is reported, saved and counted."""
    model, images = build(Narrow()), smooth_images(24)
    for speedup in (1.3, 1.5, 2.0, 2.5, 3.0):
        result = leanconv.accelerate(model, images, speedup, ranks="energy", progress=False, samples=3000)
        assert speedup <= result.speedup < 1.02 * speedup
        if any(layer.scheme == "merged" for layer in result.layers):
            break
    else:
        pytest.fail("no speed-up left the expanding layer whole")
    (report,) = [layer for layer in result.layers if layer.scheme == "merged"]
    assert report.name == "expand"
    assert report.macs_after < report.macs_before
    assert 0 < report.error < 1
    assert "expand" not in result.skipped
    assert survey(result.model, images[:1]).macs == result.macs_after
    result.save(tmp_path / "net")
    again = leanconv.load(tmp_path / "net", model=build(Narrow()))
    assert torch.equal(again(images), result.model(images))


def test_linear_layers_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 20), nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5)).eval()
    images = torch.randn(400, 3, 4, 4)
    result = leanconv.accelerate(model, images, 1.5, layers="all", progress=False)
    assert 1.5 <= result.speedup < 1.53
    assert survey(result.model, images[:1], layers="all").macs == result.macs_after


def test_what_can_be_reached_counts_merging() -> None:
    model, images = build(Narrow()), smooth_images(16)
    most = leanconv.reachable(model, images)
    for speedup in (0.7 * most, 0.9 * most):
        result = leanconv.accelerate(model, images, speedup, progress=False, samples=1000)
        assert speedup <= result.speedup < 1.02 * speedup
