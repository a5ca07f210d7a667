"""Both halves of a spatial split fitted to data in turns: the mathematics, and what becomes of a network."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import leanconv
from leanconv import ThreeD
from leanconv.calibrate.probes import Probe
from leanconv.calibrate.samples import Samples
from leanconv.errors import LeanconvError
from leanconv.forms import spatial as spatial_form
from leanconv.pipeline import solve_layers as solving
from leanconv.pipeline.solve_layers import LayerState
from leanconv.solve import Moments, SpatialFactors, spatial_basis, swept
from leanconv.solve.spatial_als import WHITE
from tests.support.command import NETWORK, call
from tests.support.equality import relative
from tests.support.networks import CONV_CASES, full_ranks, network_of, plain_network, residual
from tests.support.pictures import smooth_images, write_picture

QUICK: dict[str, Any] = {"samples": 2000, "progress": False}


def patches_of(images: Tensor, kernel: tuple[int, int]) -> Tensor:
    return F.unfold(images, kernel).transpose(1, 2).flatten(0, 1)


def layer(d: int = 12, c: int = 6, kernel: tuple[int, int] = (3, 3)) -> tuple[Tensor, Tensor]:
    """Filters, and patches of smooth images, all double."""
    torch.manual_seed(0)
    images = smooth_images(20, channels=c).double()
    return torch.randn(d, c, *kernel, dtype=torch.float64), patches_of(images, kernel)


def loss(weight: Tensor, split: SpatialFactors, patches: Tensor) -> float:
    """sum ||W x - H V x||^2 with the white share, which is what is made small."""
    apart = (weight - split.product()).flatten(1)
    x = patches - patches.mean(0)
    white = WHITE * x.square().sum(0).mean()
    return float((x @ apart.T).square().sum() + white * apart.square().sum())


@pytest.mark.parametrize("kernel", [(3, 3), (3, 5), (5, 2)])
def test_no_sweep_raises_the_error(kernel: tuple[int, int]) -> None:
    weight, patches = layer(kernel=kernel)
    moments = Moments.of(patches)
    split = spatial_basis(weight).split(5)
    losses = [loss(weight, split, patches)]
    losses += [loss(weight, swept(split, weight, moments, sweeps), patches) for sweeps in (0, 1, 2, 3, 8)]
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(losses))
    assert losses[2] < 0.9 * losses[1] < 0.9 * losses[0]  # the other half helps too


def test_a_sweep_is_a_step_down_of_both_halves() -> None:
    """In the end neither half has a slope left: gradients by autograd."""
    weight, patches = layer()
    split = swept(spatial_basis(weight).split(4), weight, Moments.of(patches), 300)
    halves = [half.clone().requires_grad_() for half in (split.first, split.second)]
    apart = (weight - SpatialFactors(*halves).product()).flatten(1)
    x = patches - patches.mean(0)
    total = (x @ apart.T).square().sum() + WHITE * x.square().sum(0).mean() * apart.square().sum()
    total.backward()
    for half in halves:
        assert half.grad is not None
        assert float(half.grad.norm() * half.detach().norm()) < 1e-3 * float(total.detach())


def test_of_white_patches_the_split_of_the_filters_is_best() -> None:
    weight, _ = layer()
    split = spatial_basis(weight).split(4)
    scatter = 7 * torch.eye(54, dtype=torch.float64)
    again = swept(split, weight, Moments(7, torch.zeros(54, dtype=torch.float64), scatter), 5)
    torch.testing.assert_close(again.product(), split.product())


def test_full_rank_is_the_filters() -> None:
    weight, patches = layer()
    split = spatial_basis(weight).split(18)
    assert relative(swept(split, weight, Moments.of(patches), 2).product(), weight) < 1e-9


def test_patches_that_do_not_vary_change_nothing() -> None:
    weight, patches = layer()
    split = spatial_basis(weight).split(4)
    same = swept(split, weight, Moments.of(torch.ones_like(patches)), 2)
    assert torch.equal(same.product(), split.product())
    assert torch.equal(swept(split, weight, Moments.of(patches[:0]), 2).product(), split.product())


def test_dead_filters_and_few_patches() -> None:
    weight, patches = layer()
    weight[3:] = 0
    split = swept(spatial_basis(weight).split(8), weight, Moments.of(patches[:3]), 3)
    assert split.product().isfinite().all()
    assert float(split.product()[3:].norm()) < 1e-9 * float(weight.norm())


def error_of(result: leanconv.Accelerated, model: nn.Module, images: Tensor) -> float:
    with torch.no_grad():
        return relative(result.model(images), model(images))


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (plain_network, {"refine": "none"}),
        (plain_network, {"refine": "none", "ranks": "sensitivity"}),
        (plain_network, {"asymmetric": False}),
        (residual, {"refine": "none", "ranks": {"a.0": (6, 10), "a.2": (6, 10), "b.2": (12, 16)}}),
    ],
)
def test_answers_come_nearer(build: Any, arguments: dict[str, Any]) -> None:
    """On images not seen, with the same ranks, where filters are not split for what their layers see anyway."""
    model, images, others = build(), smooth_images(64), smooth_images(64, seed=1)
    plain, turned = (
        leanconv.accelerate(model, images, 3, ThreeD(sweeps=sweeps), **arguments, **QUICK) for sweeps in (0, 3)
    )
    assert [layer.ranks for layer in plain.layers] == [layer.ranks for layer in turned.layers]
    assert plain.macs_after == turned.macs_after
    assert error_of(turned, model, others) < error_of(plain, model, others)


@pytest.mark.parametrize("case", CONV_CASES)
def test_full_rank_reproduces_every_convolution(case: str) -> None:
    model, images = network_of(CONV_CASES[case]), smooth_images(16)
    ranks = full_ranks(model, images, "3d", ["2", "5"])
    result = leanconv.accelerate(model, images, scheme=ThreeD(sweeps=2), ranks=ranks, **QUICK)
    fresh = smooth_images(8, seed=5)
    assert relative(result.model(fresh), model(fresh)) <= 1e-4


def test_a_run_goes_on_in_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended in its third layer and called again; other sweeps want an end of that run first."""
    model, images = plain_network(), smooth_images(32)
    wanted = leanconv.accelerate(model, images, 3, ThreeD(sweeps=2), **QUICK)
    fit, seen = solving._fit, []

    def ends(run: Any, layer: LayerState, *responses: Any) -> Any:
        seen.append(layer.name)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return fit(run, layer, *responses)

    with monkeypatch.context() as changed:
        changed.setattr(solving, "_fit", ends)
        with pytest.raises(KeyboardInterrupt):
            leanconv.accelerate(model, images, 3, ThreeD(sweeps=2), workdir=tmp_path, **QUICK)
    with pytest.raises(LeanconvError, match=r"unfinished run with sweeps=2, but sweeps=0"):
        leanconv.accelerate(model, images, 3, workdir=tmp_path, **QUICK)
    found = leanconv.accelerate(model, images, 3, ThreeD(sweeps=2), workdir=tmp_path, **QUICK)
    assert torch.equal(found.model(images), wanted.model(images))
    plain = leanconv.accelerate(model, images, 3, workdir=tmp_path, **QUICK)
    assert not torch.equal(plain.model(images), wanted.model(images))


def test_a_layer_solved_before_is_not_swept_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = plain_network(), smooth_images(32)
    wanted = leanconv.accelerate(model, images, 3, ThreeD(sweeps=1), workdir=tmp_path, **QUICK)
    assert wanted.layers
    monkeypatch.setattr(spatial_form, "swept", lambda *_: pytest.fail("swept again"))
    found = leanconv.accelerate(model, images, 3, ThreeD(sweeps=1), workdir=tmp_path, **QUICK)
    assert torch.equal(found.model(images), wanted.model(images))


def test_little_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[str | None] = []
    expect = Samples.expect

    def noted(self: Samples, probe: Probe, rows: int, *, adds: bool) -> None:
        expect(self, probe, rows, adds=adds)
        places.append(self._kept[probe.site.name].place)

    monkeypatch.setattr(Samples, "expect", noted)
    model, images = plain_network(), smooth_images(32)
    wanted, found = (
        leanconv.accelerate(model, images, 3, ThreeD(sweeps=1), memory=memory, **QUICK) for memory in (None, "1KB")
    )
    assert set(places[: len(places) // 2]) == {"host"}
    assert set(places[len(places) // 2 :]) == {"disk"}
    assert torch.equal(found.model(images), wanted.model(images))


def test_no_more_patches_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that runs on sixteen crops of each image."""

    class Crops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), plain_network((8, 12, 12))[3:]
            self.head[0] = nn.Conv2d(8, 12, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).relu().unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
            return self.head(x).unflatten(0, (-1, 16)).mean(1)

    torch.manual_seed(0)
    rows: list[int] = []

    def noted(split: SpatialFactors, weight: Tensor, patches: Moments, sweeps: int) -> SpatialFactors:
        rows.append(patches.count)
        return swept(split, weight, patches, sweeps)

    monkeypatch.setattr(spatial_form, "swept", noted)
    monkeypatch.setattr(solving, "ROWS", 320)
    leanconv.accelerate(Crops().eval(), smooth_images(40), 1.5, ThreeD(sweeps=1), **QUICK)
    assert max(rows) == 320


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    model, images = plain_network().to(dtype), smooth_images(32).to(dtype)
    result = leanconv.accelerate(model, images, 2, ThreeD(sweeps=1), **QUICK)
    assert {parameter.dtype for parameter in result.model.parameters()} == {dtype}
    assert relative(result.model(images).double(), model(images).double()) < 0.1


def test_the_commands_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NETWORK)
    for number in range(8):
        write_picture(tmp_path / "photos" / f"{number}.png", 20 + 30 * number)
    words = "accelerate net.py:build --images photos --size 32 --speedup 2 --samples 500 --workers 0 --sweeps 2"
    code, _, meanwhile = call(f"{words} --out fast", monkeypatch, capsys)
    assert code == 0, meanwhile
    assert "fitting splits" in meanwhile
    assert json.loads(Path("fast/leanconv.json").read_text())["options"]["sweeps"] == 2
    code, _, meanwhile = call(f"{words} --scheme channel --out other", monkeypatch, capsys)
    assert code == 2
    assert "sweeps=2 fits the spatial splits of scheme='3d'" in meanwhile
    assert not Path("other").exists()


def test_refusals() -> None:
    model, images = plain_network(), smooth_images(8)
    with (
        pytest.warns(FutureWarning, match="sweeps= is going"),
        pytest.raises(LeanconvError, match="sweeps=2 fits the spatial splits of scheme='3d', and scheme='channel'"),
    ):
        leanconv.accelerate(model, images, scheme="channel", sweeps=2)
    for wrong in (-1, 1.5, "2", True):
        with pytest.raises(LeanconvError, match=r"sweeps=.* must be a whole number from 0"):
            ThreeD(sweeps=wrong)  # type: ignore[arg-type]
