"""Ranks by what they do to the output: the curves, what is measured, the plans, refusals and the workdir."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import leanconv
from leanconv.calibrate.batches import Batch
from leanconv.calibrate.probes import Probe
from leanconv.errors import LeanconvError
from leanconv.forms import CHANNEL, SCHEMES, SPATIAL, THREE_D, Choice
from leanconv.forms.replace import Change
from leanconv.forms.spatial import FILTERS
from leanconv.network.fold import folded
from leanconv.network.layers.modules import Factors
from leanconv.network.survey import survey
from leanconv.ranks.select import select
from leanconv.ranks.sensitivity import selector
from leanconv.ranks.sensitivity.measure import Listener, Projected, split_loss
from leanconv.ranks.sensitivity.merit import MOST, Curve, LayerSensitivity, allowed, isotonic, least_change, lost
from leanconv.solve import spatial_basis
from tests.support.candidates import FIXED, NETWORK, achieved
from tests.support.command import NETWORK as NET_PY
from tests.support.command import call
from tests.support.detectors import build
from tests.support.equality import relative
from tests.support.networks import plain_network, residual
from tests.support.pictures import smooth_images, write_picture

CPU = torch.device("cpu")
QUICK: dict[str, Any] = {"samples": 2000, "progress": False, "solver": "linear"}


class Deaf(nn.Module):
    """Two branches of the same kind; the output does not depend on the second."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.heard = nn.Conv2d(16, 32, 3, padding=1)
        self.unheard = nn.Conv2d(16, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return (self.heard(x).relu() + 0 * self.unheard(x).relu()).mean((2, 3))


def pointwise() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 1),
        nn.ReLU(),
        nn.Conv2d(64, 32, 3, padding=1, groups=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 1),
        nn.ReLU(),
        nn.Flatten(2),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
    ).eval()


def batch_of(images: Tensor) -> list[Batch]:
    return [Batch(0, len(images), (images,))]


def projected(model: nn.Module, images: Tensor, name: str, rank: int) -> tuple[Change, Factors]:
    """A site approximated by the leading components of its responses at every position."""
    site = next(site for site in survey(model, images).sites if site.name == name)
    weight, bias = folded(model, site, torch.float64)
    seen: list[Tensor] = []
    hook = model.get_submodule(site.tail).register_forward_hook(lambda _, __, y: seen.append(y.detach().clone()))
    with torch.no_grad():
        model(images)
    hook.remove()
    y = seen[0].movedim(1, -1).flatten(0, -2)
    form = Change(name=name, form=CHANNEL, ranks=(rank,), geometry=site.geometry, batch_norm=site.batch_norm)
    return form, Projected(Probe(site, weight, bias), y, rank).factors(rank)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(1e-6, 1), st.floats(0, 100)), max_size=6, unique_by=lambda p: p[0]),
    st.lists(st.floats(0, 1.5), min_size=2, max_size=20),
)
def test_curves_never_fall_and_begin_at_nothing(points: list[tuple[float, float]], at: list[float]) -> None:
    curve = Curve(tuple(points), 0.5)
    assert curve(0.0) == 0.0
    values = [curve(x) for x in sorted(at)]
    assert all(low <= high * (1 + 1e-9) for low, high in pairwise(values))


def test_curves_pass_through_what_was_measured() -> None:
    points = ((0.03, 0.01), (0.1, 0.04), (0.3, 0.5))
    curve = Curve(points, 0.5)
    assert [curve(x) for x, _ in points] == pytest.approx([y for _, y in points])
    assert curve(0.03 / 4) == pytest.approx(0.01 / 2)  # a quarter of the energy is half the length
    assert curve(0.9) == pytest.approx(0.5 * 12.5)  # as from 0.1 to 0.3
    # where a measurement falls, between the two
    assert Curve(((0.1, 4.0), (0.2, 1.0)), 0.5)(0.15) == pytest.approx(2.0)
    assert isotonic([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]


def test_where_a_curve_is_reached() -> None:
    points = ((0.03, 0.01), (0.1, 0.04), (0.3, 0.5))
    curve = Curve(points, 0.5)
    for x in (0.001, 0.03, 0.07, 0.1, 0.2, 0.3, 0.9):
        assert curve.reaches(curve(x)) == pytest.approx(x)
    # a layer the output does not depend on never gets there
    assert Curve(((0.03, 0.0), (0.3, 0.0)), 0.5).reaches(0.1) == MOST


SPLITS = ((0.2, 0.05), (0.5, 0.3))
SHARP = LayerSensitivity(output=((0.03, 0.02), (0.1, 0.08), (0.3, 0.4)), splits={FILTERS: SPLITS})
DULL = LayerSensitivity(output=tuple((x, y / 100) for x, y in SHARP.output), splits=SHARP.splits)


def test_losses_of_both_ranks_add() -> None:
    one, splits = NETWORK[2], {FILTERS: Curve(SPLITS, 1.0)}
    pair, channel, spatial = Choice(THREE_D, (90, 40)), Choice(CHANNEL, (40,)), Choice(SPATIAL, (90,))
    assert lost(one, pair, splits) == pytest.approx(lost(one, channel, splits) + lost(one, spatial, splits))
    assert min(lost(one, channel, splits), lost(one, spatial, splits)) > 0
    full = Choice(THREE_D, (one.geometry.spatial_limit, one.geometry.channel_limit))
    assert lost(one, full, splits) == pytest.approx(0, abs=1e-12)


def test_layers_may_lose_what_changes_the_output_alike() -> None:
    three = {"a": SHARP, "b": DULL, "c": SHARP}
    assert allowed(three)["a"] == pytest.approx(0.1)  # the middle one
    change = Curve(DULL.output, 0.5)(allowed(three)["b"])
    assert change == pytest.approx(Curve(SHARP.output, 0.5)(0.1))
    assert allowed({**three, "d": LayerSensitivity(output=())})["d"] == pytest.approx(0.1)


@pytest.mark.parametrize("speedup", [1.3, 2.0, 3.0, 4.0])
@pytest.mark.parametrize("scheme", ["channel", "spatial", "3d"])
def test_the_layer_that_matters_least_is_cut_most(scheme: Any, speedup: float) -> None:
    """The same layers, one of which changes the output a hundred times less: it costs less, and the others more."""
    macs = []
    for which in (SHARP, DULL):
        merit = least_change({one.name: SHARP for one in NETWORK} | {"c": which}, refits=True)
        plan = select(NETWORK, fixed=FIXED, speedup=speedup, scheme=SCHEMES[scheme], search="forms", merit=merit)
        assert speedup <= achieved(NETWORK, plan, FIXED) < 1.02 * speedup
        macs.append(NETWORK[2].macs(plan.get("c")))
    assert macs[1] < macs[0]


def test_layers_that_are_fitted_in_factors_are_not_left_whole() -> None:
    """What the layers before have lost is made up for where a layer is fitted, and only there."""
    measured = {one.name: SHARP for one in NETWORK}

    def planned(refits: bool) -> set[str]:
        merit = least_change(measured, refits=refits)
        return set(select(NETWORK, fixed=FIXED, speedup=1.2, scheme=SCHEMES["channel"], search="forms", merit=merit))

    assert planned(True) == set(measured)
    assert planned(False) < set(measured)


@pytest.mark.parametrize("name", ["3", "7"])
def test_full_rank_changes_nothing(name: str) -> None:
    model, images = plain_network().double(), smooth_images(8).double()
    listener = Listener(model, batch_of(images), CPU, 0)
    full = next(s for s in survey(model, images).sites if s.name == name).geometry.channel_limit
    assert listener.change(*projected(model, images, name, full)) < 1e-6
    assert listener.change(*projected(model, images, name, full // 4)) > 1e-3


def test_change_is_that_of_a_copy_approximated_by_hand() -> None:
    model, images = plain_network(batch_norm=False).double(), smooth_images(8).double()
    form, factors = projected(model, images, "2", 5)
    other = copy.deepcopy(model)
    reduce, expand = factors.weights
    with torch.no_grad():
        other[2].weight.copy_((expand @ reduce.flatten(1)).reshape_as(other[2].weight))
        other[2].bias.copy_(factors.bias)
        before, after = (net(images) - net(images).mean(1, keepdim=True) for net in (model, other))
    wanted = (after - before).norm(dim=1).sum() / before.norm(dim=1).sum()
    halves = [Batch(0, 3, (images[:3],)), Batch(3, 5, (images[3:],))]
    for listener in (Listener(model, batch_of(images), CPU, 0), Listener(model, halves, CPU, 0)):
        assert listener.change(form, factors) == pytest.approx(float(wanted), rel=1e-9)
        assert listener.change(form, factors) == pytest.approx(float(wanted), rel=1e-9)  # all is as it was before


def test_a_constant_added_to_all_classes_does_not_count() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.rest = nn.Conv2d(3, 4, 3)
            with torch.no_grad():  # as training with softmax does not move what classes have in common
                self.rest.weight -= self.rest.weight.mean(0)

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(x).mean((2, 3)) + 0.5 * self.conv(x).mean((1, 2, 3))[:, None]

    torch.manual_seed(0)
    model, images = Shifted().eval().double(), smooth_images(6).double()
    listener = Listener(model, batch_of(images), CPU, 0)
    assert listener.change(*projected(model, images, "conv", 1)) < 1e-9
    assert listener.change(*projected(model, images, "rest", 1)) > 1e-3


def test_what_moves_all_numbers_of_a_regressor_counts() -> None:
    class Regressor(nn.Module):
        """Answers 10 a + b and 10 a - b: a is nearly all there is, and no constant to add to classes."""

        def __init__(self) -> None:
            super().__init__()
            self.much = nn.Conv2d(3, 8, 3)
            self.little = nn.Conv2d(3, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            a, b = (10 * self.much(x).mean((1, 2, 3)), self.little(x).mean((1, 2, 3)))
            return torch.stack([a + b, a - b], 1)

    torch.manual_seed(0)
    model, images = Regressor().eval().double(), smooth_images(6).double()
    listener = Listener(model, batch_of(images), CPU, 0)
    much, little = (listener.change(*projected(model, images, name, 1)) for name in ("much", "little"))
    assert much > little > 0


def test_what_is_common_to_all_numbers_counts_by_degrees() -> None:
    """Answers a + b and a - b: whether a has a little more of them or a little less than b is no great matter."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
            self.scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            a, b = (layer(x).mean((1, 2, 3)) for layer in (self.a, self.b))
            return torch.stack([self.scale * a + b, self.scale * a - b], 1)

    torch.manual_seed(0)
    model, images = Pair().eval().double(), smooth_images(6).double()
    with torch.no_grad():
        a, b = (layer(images).mean((1, 2, 3)) for layer in (model.a, model.b))
    changes = []
    for factor in (0.98, 1.02):
        model.scale = factor * float(b.std() / a.std())
        changes.append(Listener(model, batch_of(images), CPU, 0).change(*projected(model, images, "a", 1)))
    assert 0 < changes[0] < changes[1] < 1.5 * changes[0]


def test_regression_gets_back_what_a_split_only_mixes_up() -> None:
    torch.manual_seed(0)
    model, images = plain_network(batch_norm=False).double(), smooth_images(8).double()
    site = next(site for site in survey(model, images).sites if site.name == "2")
    weight, bias = folded(model, site, torch.float64)
    # Of white noise the split itself keeps all it can; these have directions the filters' energy knows nothing of.
    patches = torch.randn(4000, 20, dtype=torch.float64) @ torch.randn(20, weight[0].numel(), dtype=torch.float64)
    y = patches @ weight.flatten(1).T + bias
    mixing = torch.eye(len(bias), dtype=torch.float64) + 0.1 * torch.randn(len(bias), len(bias), dtype=torch.float64)
    probe = Probe(site, weight, bias)
    assert split_loss(probe, y, y @ mixing, corrected=True) < 1e-6
    split = spatial_basis(weight).split(12).product()
    given = patches @ split.flatten(1).T + bias
    plain = relative(given, y) ** 2 * float(y.square().sum() / (y - y.mean(0)).square().sum())
    assert split_loss(probe, y, given, corrected=False) == pytest.approx(plain, rel=0.05)  # of half of the rows
    assert 0 < split_loss(probe, y, given, corrected=True) < 0.95 * plain


@pytest.mark.parametrize("speedup", [2.0, 3.0, 4.0])
@pytest.mark.parametrize("build", [plain_network, residual, pointwise])
def test_target_is_met(build: Any, speedup: float) -> None:
    result = leanconv.accelerate(build(), smooth_images(), speedup, ranks="sensitivity", skip=[], **QUICK)
    assert speedup <= result.speedup < 1.02 * speedup
    assert result.seconds["measuring layers"] > 0


@pytest.mark.parametrize("scheme", ["channel", "spatial"])
def test_other_schemes(scheme: Any) -> None:
    result = leanconv.accelerate(plain_network(), smooth_images(), 2, scheme, ranks="sensitivity", **QUICK)
    assert 2 <= result.speedup < 2.04
    assert {layer.scheme for layer in result.layers} == {scheme}


@pytest.mark.parametrize("scheme", ["channel", "spatial", "3d"])
def test_a_layer_whose_responses_never_vary(scheme: Any) -> None:
    network = plain_network(batch_norm=False)
    dead = network[2]
    assert isinstance(dead, nn.Conv2d)
    nn.init.zeros_(dead.weight)
    nn.init.constant_(dead.bias, -1.0)
    result = leanconv.accelerate(network, smooth_images(), 2, scheme, ranks="sensitivity", **QUICK)
    assert 2 <= result.speedup < 2.04


def test_what_the_output_does_not_depend_on_gets_the_least() -> None:
    torch.manual_seed(0)
    result = leanconv.accelerate(Deaf().eval(), smooth_images(), 1.8, ranks="sensitivity", **QUICK)
    macs = {layer.name: layer.macs_after for layer in result.layers}
    assert macs["unheard"] < 0.1 * macs.get("heard", 16 * 16 * 32 * 16 * 9)


def test_same_seed_same_plan() -> None:
    plans = [
        [(layer.name, layer.scheme, layer.ranks) for layer in result.layers]
        for result in (
            leanconv.accelerate(plain_network(), smooth_images(40).split(7), 3, ranks="sensitivity", **QUICK)
            for _ in range(2)
        )
    ]
    assert plans[0] == plans[1]


def test_outputs_of_many_tensors_and_images_of_many_sizes() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = plain_network()[:8]

        def forward(self, x: Tensor) -> dict[str, Any]:
            features = self.body(x)
            return {"map": features, "names": ["a"], "mean": [features.mean((2, 3)), features.argmax(1)]}

    batches = [smooth_images(4, size) for size in (16, 20, 16)]
    result = leanconv.accelerate(Many().eval(), batches, 2, ranks="sensitivity", **QUICK)
    assert 2 <= result.speedup < 2.04


def test_detectors_answer_with_many_tensors() -> None:
    generator = torch.Generator().manual_seed(0)
    images = [[torch.rand(3, *size, generator=generator) for size in ((64, 80), (70, 64))] for _ in range(3)]
    result = leanconv.accelerate(build("retinanet"), images, 1.5, ranks="sensitivity", **QUICK)
    assert 1.5 <= result.speedup < 1.53


def test_refusals() -> None:
    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = plain_network()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).argmax(1)

    with pytest.raises(LeanconvError, match=r"returns no floating-point tensors; use ranks='energy'\.$"):
        leanconv.accelerate(Classes().eval(), smooth_images(), 2, ranks="sensitivity", **QUICK)
    silent = plain_network()
    nn.init.zeros_(silent[-1].weight)
    nn.init.zeros_(silent[-1].bias)
    with pytest.raises(LeanconvError, match=r"are all 0 or not finite on these images; use ranks='energy'\.$"):
        leanconv.accelerate(silent, smooth_images(), 2, ranks="sensitivity", **QUICK)
    with (
        pytest.warns(FutureWarning, match="target= is going"),
        pytest.raises(LeanconvError, match=r"target=.* goes with ranks='latency' only"),
    ):
        leanconv.accelerate(plain_network(), smooth_images(), ranks="sensitivity", target=leanconv.Target())


def test_workdir_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another speed-up measures nothing again; another scheme what it needs besides."""
    arguments: dict[str, Any] = {"ranks": "sensitivity", "workdir": tmp_path / "work", **QUICK}
    asked: list[str] = []
    measured = Listener.change

    def noted(self: Listener, form: Change, factors: Factors) -> float:
        asked.append(form.form.name)
        return measured(self, form, factors)

    monkeypatch.setattr(Listener, "change", noted)
    model, images = plain_network(), smooth_images()
    leanconv.accelerate(model, images, 2, **arguments)
    assert set(asked) == {"channel"}
    asked.clear()
    again = leanconv.accelerate(model, images, 3, **arguments)
    assert not asked
    leanconv.accelerate(model, images, 2, "spatial", **arguments)
    assert set(asked) == {"spatial"}
    fresh = leanconv.accelerate(model, images, 3, ranks="sensitivity", **QUICK)
    assert [layer.ranks for layer in again.layers] == [layer.ranks for layer in fresh.layers]


def test_few_images_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is compared on IMAGES of them however many there are, drawn from all."""
    seen: list[list[Batch]] = []
    begin = Listener.__init__

    def noted(self: Listener, original: nn.Module, images: list[Batch], *rest: Any) -> None:
        seen.append(images)
        begin(self, original, images, *rest)

    monkeypatch.setattr(Listener, "__init__", noted)
    images = smooth_images(50)
    leanconv.accelerate(plain_network(), images.split(5), 2, ranks="sensitivity", **QUICK)
    (found,) = seen
    drawn = torch.cat([piece for batch in found for piece in batch.pieces])
    assert len(drawn) == selector.IMAGES
    numbers = [int((images == one).flatten(1).all(1).nonzero()) for one in drawn]
    assert len({number // 5 for number in numbers}) > 5


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(NET_PY)
    for number in range(8):
        write_picture(tmp_path / "photos" / f"{number}.png", 20 + 30 * number)
    monkeypatch.chdir(tmp_path)
    words = "accelerate net.py:build --images photos --size 32 --speedup 2 --samples 200 --ranks sensitivity --report"
    code, said, meanwhile = call(f"{words} --workers 0 --out fast", monkeypatch, capsys)
    assert code == 0, meanwhile
    assert "2.0" in said
    assert "measuring layers" in meanwhile
    page = (tmp_path / "fast" / "report.html").read_text()
    assert "ranks by sensitivity" in page
    assert "This run chose its ranks in another way" in page
    code, said, meanwhile = call("accelerate net.py:build --images photos --ranks feeling --out b", monkeypatch, capsys)
    assert code == 2
    assert "use 'uniform', 'energy', 'sensitivity', 'latency' or a dict" in meanwhile
