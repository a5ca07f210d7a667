"""How far the output moves by errors of a layer: what gradients estimate, against the exact Jacobian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian

from leanconv.calibrate.batches import Batch
from leanconv.calibrate.gradients import LOSSES, Gradients
from leanconv.calibrate.probes import Probe
from leanconv.calibrate.streams import in_parts
from leanconv.errors import LeanconvError
from leanconv.network.layers.kinds import KINDS
from tests.support.equality import relative
from tests.support.gradients import measured, probes_of, respond, responses_of
from tests.support.networks import plain_network, settle_batch_norms
from tests.support.pictures import smooth_images


class Twice(nn.Module):
    """Its second layer runs on two maps of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        levels = [x, nn.functional.avg_pool2d(x, 2)]
        return torch.cat([self.last(level).relu().mean(3) for level in levels], 2)


class Tokens(nn.Module):
    """Linear layers on many rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 8, 3, stride=2), nn.Linear(8, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).flatten(2).transpose(1, 2)).tanh()).mean(1)[:, :, None]


def straight() -> nn.Module:
    """Without an activation."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3, padding=1), nn.Conv2d(12, 5, 3), nn.AvgPool2d(2))


def behind(*layers: nn.Module) -> nn.Module:
    """``layers`` of 8 -> 12 channels between two others; the activation works in place, as most do."""
    return settle_batch_norms(nn.Sequential(nn.Conv2d(3, 8, 3), *layers, nn.Conv2d(12, 4, 3), nn.AvgPool2d(2)))


# A network and one of its layers.
CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "straight": (straight, "1"),
    "activation": (lambda: behind(nn.Conv2d(8, 12, 3), nn.ReLU(inplace=True)), "1"),
    "groups": (lambda: behind(nn.Conv2d(8, 12, 3, groups=2), nn.Tanh()), "1"),
    "batch norm": (lambda: behind(nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12), nn.ReLU(inplace=True)), "1"),
    "norm with activation": (
        lambda: behind(nn.Conv2d(8, 12, 3), timm.layers.BatchNormAct2d(12, act_layer=nn.SiLU)),
        "1",
    ),
    "twice": (Twice, "last"),
    "linear": (Tokens, "second"),
}


def case(name: str) -> tuple[nn.Module, Probe, Tensor]:
    torch.manual_seed(0)
    build, layer = CASES[name]
    model = build().double().eval()
    # Without smoothing a layer's first components would hold nearly all there is.
    images = 0.2 * smooth_images(6, 8).double() + torch.randn(6, 3, 8, 8, dtype=torch.float64)
    return model, probes_of(model, images)[layer], images


def cut(probe: Probe, y: Tensor, loss: float) -> tuple[float, Callable[[Tensor], Tensor]]:
    """The share of the responses' energy that is lost at the smallest rank that loses no more than ``loss``, and what
    responses lose: their last principal components, those of each group."""
    groups = y.unflatten(1, (probe.site.geometry.groups, -1)).transpose(0, 1)
    mean = groups.mean(1, keepdim=True)
    _, s, vh = torch.linalg.svd(groups - mean, full_matrices=False)
    lost = 1 - s.square().sum(0).cumsum(0) / s.square().sum()
    rank = int((lost > loss).sum()) + 1

    def error(z: Tensor) -> Tensor:
        apart = z.unflatten(-1, (len(groups), -1)) - mean[:, 0]
        kept = torch.einsum("...gd,grd,gre->...ge", apart, vh[:, :rank], vh[:, :rank])
        return (kept - apart).flatten(-2)

    return float(lost[rank - 1]), error


def with_errors(model: nn.Module, probe: Probe, error: Callable[[int, Tensor], Tensor], images: Tensor) -> Tensor:
    """The output where ``error`` (number of the call, responses N x positions x d) is added to the responses."""
    site = probe.site
    kind, layer = KINDS[site.geometry.kind], model.get_submodule(site.name)
    gain = (probe.weight.flatten(1) / layer.weight.detach().flatten(1)).mean(1)  # batch norm's
    calls = 0

    def add(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        nonlocal calls
        e = error(calls, respond(probe, inputs[0])) / gain
        calls += 1
        return output + (e.transpose(1, 2) if kind.over_a_map else e).reshape(output.shape)

    hook = layer.register_forward_hook(add)
    try:
        return model(images)  # type: ignore[no-any-return]
    finally:
        hook.remove()


def exact(model: nn.Module, probe: Probe, images: Tensor) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Of every image and call: the Jacobian of o / |o| in the responses (numbers x positions x d), and responses."""
    slopes, responses = [], []
    for image in images.split(1):
        ys: list[Tensor] = []
        with torch.no_grad():
            o = with_errors(model, probe, lambda _, y: ys.append(y[0]) or torch.zeros_like(y), image)  # noqa: B023

        def moved(*errors: Tensor) -> Tensor:
            return with_errors(model, probe, lambda call, _: errors[call][None], image).flatten() / o.norm()  # noqa: B023

        slopes.append(list(jacobian(moved, tuple(torch.zeros_like(y) for y in ys))))
        responses.append(ys)
    return slopes, responses


DRAWS = 400


@pytest.mark.parametrize("name", CASES)
def test_metric_and_changes_are_those_of_the_jacobian(name: str) -> None:
    model, probe, images = case(name)
    found = measured(model, images, draws=DRAWS)[probe.site.name]
    slopes, responses = exact(model, probe, images)
    groups = probe.site.geometry.groups
    rows = torch.cat([slope.flatten(0, 1) for image in slopes for slope in image]).unflatten(1, (groups, -1))
    wanted = torch.einsum("ngi,ngj->gij", rows, rows)
    assert relative(torch.stack(found.metric) / DRAWS, wanted) < 0.1
    y = responses_of(model, images, probe)
    cuts = [cut(probe, y, loss) for loss in LOSSES]
    cuts = [one for one in cuts if one[0] > 1e-6]  # a group of few filters may have no such rank but its full one
    assert len(cuts) >= 2
    for (share, change), (lost, error) in zip(found.changes, cuts, strict=True):
        assert share == pytest.approx(lost, rel=1e-3)
        of_images = [
            sum(torch.einsum("opd,pd->o", slope, error(z)) for slope, z in zip(*image, strict=True))
            for image in zip(slopes, responses, strict=True)
        ]
        assert change == pytest.approx(float(torch.stack(of_images).square().sum(1).mean().sqrt()), rel=0.06)  # type: ignore[arg-type]


def test_of_a_linear_network_the_change_is_that_of_the_output_with_components_cut() -> None:
    model, probe, images = case("straight")
    found = measured(model, images, draws=DRAWS)[probe.site.name]
    y = responses_of(model, images, probe)
    with torch.no_grad():
        before = model(images).flatten(1)
        for (_, change), loss in zip(found.changes, LOSSES, strict=True):
            _, error = cut(probe, y, loss)
            after = with_errors(model, probe, lambda _, z: error(z), images).flatten(1)  # noqa: B023
            wanted = ((after - before).norm(dim=1) / before.norm(dim=1)).square().mean().sqrt()
            assert change == pytest.approx(float(wanted), rel=0.06)


def assert_alike(a: dict[str, Gradients], b: dict[str, Gradients], tolerance: float = 1e-6) -> None:
    assert a.keys() == b.keys()
    for name, one in a.items():
        assert relative(torch.stack(b[name].metric), torch.stack(one.metric)) < tolerance
        assert torch.tensor(b[name].changes).allclose(torch.tensor(one.changes), rtol=tolerance)


def classifier() -> nn.Module:
    return plain_network((8, 12)).double()


@pytest.mark.parametrize("sizes", [(1,) * 40, (5, 7, 28), (2, 38)])
def test_how_images_are_cut_into_batches_makes_no_difference(sizes: tuple[int, ...]) -> None:
    """Neither to the draws nor to what is common to all scores, which one image does not show."""
    model, images = classifier(), smooth_images(40).double()
    assert_alike(measured(model, images), measured(model, images, cut=sizes))


@pytest.mark.parametrize("most", [1, 2, 4, 5, 32])
def test_images_go_through_as_many_at_a_time_as_may(most: int) -> None:
    """Images that were drawn one by one, or batches that were joined, too."""
    images = torch.arange(12.0).reshape(12, 1)
    whole = Batch(0, 5, (images[:5],))
    pieces = Batch(5, 4, tuple(images[5:9].split(1)))
    uneven = Batch(9, 3, tuple(images[9:].split([2, 1])))
    cpu = torch.device("cpu")
    found = [batch.on(cpu) for batch in in_parts([whole, pieces, uneven], most)]
    assert torch.cat(found).equal(images)
    assert [len(one) for one in found] == {
        1: [1] * 12,
        2: [2, 2, 1, 2, 2, 2, 1],
        4: [4, 1, 4, 3],
        5: [5, 4, 3],
        32: [5, 4, 3],
    }[most]


def test_a_seed_gives_its_draws_and_no_others() -> None:
    model, images = classifier(), smooth_images(12).double()
    assert_alike(measured(model, images), measured(model, images), 1e-12)
    with pytest.raises(AssertionError):
        assert_alike(measured(model, images), measured(model, images, seed=1))


def test_the_users_network_stays_as_it_is() -> None:
    model, images = classifier(), smooth_images(6).double()
    first = next(model.parameters())
    first.requires_grad_(False)
    seen: list[int] = []
    hook = model[0].register_forward_hook(lambda *_: seen.append(1))
    before = [parameter.requires_grad for parameter in model.parameters()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    hooks = {name: list(one._forward_hooks) for name, one in model.named_modules()}
    measured(model, images)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert {name: list(one._forward_hooks) for name, one in model.named_modules()} == hooks
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    hook.remove()


def test_all_parameters_may_be_frozen() -> None:
    model, images = classifier(), smooth_images(6).double()
    usual = measured(model, images)
    assert_alike(usual, measured(model.requires_grad_(False), images), 1e-12)


def largest_changes(model: nn.Module, images: Tensor, draws: int = 1) -> dict[str, float]:
    return {
        name: max(change for _, change in one.changes) for name, one in measured(model, images, draws=draws).items()
    }


def test_a_constant_added_to_all_classes_does_not_count() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.rest = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 4, 3)
            with torch.no_grad():  # as training with softmax does not move what classes have in common
                self.rest.weight -= self.rest.weight.mean(0)

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(x).mean((2, 3)) + 0.5 * self.conv(x).mean((1, 2, 3))[:, None]

    torch.manual_seed(0)
    changes = largest_changes(Shifted().eval().double(), smooth_images(6).double())
    assert changes["conv"] < 1e-9
    assert changes["rest"] > 1e-3


class Pair(nn.Module):
    """Answers ``scale`` a + b and ``scale`` a - b."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), scale

    def forward(self, x: Tensor) -> Tensor:
        a, b = (layer(x).mean((1, 2, 3)) for layer in (self.a, self.b))
        return torch.stack([self.scale * a + b, self.scale * a - b], 1)


def pair(factor: float, images: Tensor) -> Pair:
    """``scale`` a varies ``factor`` times as much as b."""
    torch.manual_seed(0)
    model = Pair(1.0).eval().double()
    with torch.no_grad():
        a, b = (layer(images).mean((1, 2, 3)) for layer in (model.a, model.b))
    model.scale = factor * float(b.std() / a.std())
    return model


def felt(model: nn.Module, images: Tensor) -> dict[str, float]:
    """Mean square of the gradients."""
    return {name: float(one.metric[0].trace()) for name, one in measured(model, images, draws=100).items()}


def test_what_moves_all_numbers_of_a_regressor_counts() -> None:
    """Nearly all there is in its answers is common to them, and no constant to add to classes."""
    images = smooth_images(6).double()
    model = pair(10, images)
    found = felt(model, images)
    assert found["a"] / found["b"] == pytest.approx(model.scale**2, rel=0.2)


def test_what_is_common_to_all_numbers_counts_by_degrees() -> None:
    """Whether there is a little more or a little less of it than of the rest is no great matter."""
    images = smooth_images(6).double()
    less, more = (felt(pair(factor, images), images)["a"] for factor in (0.98, 1.02))
    assert 0 < less < more < 2 * less


def test_a_layer_the_output_does_not_depend_on_moves_nothing() -> None:
    class Deaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heard, self.unheard = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.heard(x).relu() + 0 * self.unheard(x).relu()

    found = measured(Deaf().eval().double(), smooth_images(6).double())
    assert all(change == 0 for _, change in found["unheard"].changes)
    assert found["unheard"].metrics == [None]
    assert found["heard"].metrics != [None]


def test_a_layer_whose_responses_never_vary_changes_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).double()
    nn.init.zeros_(model[0].weight)
    found = measured(model, smooth_images(6).double())
    assert all(change == 0 for _, change in found["0"].changes)


class Ends(nn.Module):
    """``way`` is between its only layer and its output."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.way = nn.Conv2d(3, 8, 3), way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.conv(x).relu())


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        return 2 * x


def in_place(x: Tensor) -> Tensor:
    y = x.exp()
    return y.add_(1) * y.mul_(2)


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (without_gradients, "are all 0, not finite or do not depend on its layers"),
        (lambda x: torch.from_numpy(x.numpy() * 2), "cannot be differentiated"),
        (in_place, "cannot be differentiated"),
        (lambda x: 0 * x, "are all 0, not finite or do not depend on its layers"),
        (lambda x: x / 0, "are all 0, not finite or do not depend on its layers"),
        (lambda x: x.argmax(1), "are all 0, not finite or do not depend on its layers"),
    ],
)
def test_outputs_that_cannot_be_differentiated(way: Callable[[Tensor], Tensor], said: str) -> None:
    torch.manual_seed(0)
    model = Ends(way).eval().double()
    with pytest.raises(LeanconvError, match=said):
        measured(model, smooth_images(4).double())


def test_layers_that_run_without_gradients_do_not_hide_the_others() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.first(x).relu()
            return self.second(x)

    found = measured(Frozen().eval().double(), smooth_images(4).double())
    assert found["first"].metrics == [None]
    assert found["first"].changes == ()  # which is not known to be nothing
    assert found["second"].metrics != [None]


def test_an_error_of_the_network_itself_is_not_hidden() -> None:
    def broken(x: Tensor) -> Tensor:
        if x.requires_grad:
            raise KeyError("way")
        return x

    with pytest.raises(KeyError):
        measured(Ends(broken).eval().double(), smooth_images(4).double())
