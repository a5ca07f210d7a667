"""What training from scratch starts from."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from benchmarks.common.initialise import initialise, scratch
from leanconv import LeanconvError, models
from leanconv.forms import FORMS
from leanconv.forms.replace import Change, replace
from leanconv.network.layers.kinds import geometry_of


def ten_layers(width: int = 96) -> nn.Sequential:
    # Circular padding: zeros around a map would take from the scale, and that is no matter of weights.
    convolutions = [nn.Conv2d(width, width, 3, padding=1, padding_mode="circular") for _ in range(10)]
    return nn.Sequential(*(module for layer in convolutions for module in (layer, nn.ReLU())))


def factored(network: nn.Sequential, scheme: str, ranks: tuple[int, ...]) -> nn.Sequential:
    for name, module in list(network.named_children()):
        if isinstance(module, nn.Conv2d):
            replace(network, Change(name=name, form=FORMS[scheme], ranks=ranks, geometry=geometry_of(module)))
    return network


def deviations(network: nn.Sequential) -> list[float]:
    """The deviation of what enters every ReLU."""
    x = torch.randn(4, 96, 12, 12, generator=torch.Generator().manual_seed(1))
    found = []
    with torch.no_grad():
        for layer, activation in zip(network[::2], network[1::2], strict=True):
            response = layer(x)
            found.append(float(response.std()))
            x = activation(response)
    return found


RANKS = {"channel": (48,), "spatial": (48,), "3d": (48, 40)}


@pytest.mark.parametrize("scheme", ["none", *RANKS])
def test_activations_keep_their_scale(scheme: str) -> None:
    """In the mean over draws: one network of this width wanders by some tens of per cent."""
    network = ten_layers()
    if scheme != "none":
        network = factored(network, scheme, RANKS[scheme])
    draws = torch.tensor([deviations(initialise(network, seed)) for seed in range(6)])
    found = draws.square().mean(dim=0).sqrt()
    # The noise that enters has mean square 1, and so has what each ReLU lets through: half of 2.
    assert float(found[0]) == pytest.approx(2**0.5, rel=0.1)
    assert float((found / found[0]).log2().abs().max()) < 0.7


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(64, 64, 3, groups=8),
        nn.Conv1d(64, 64, 5, dilation=2),
        nn.ConvTranspose2d(64, 64, 4, stride=2),
        nn.ConvTranspose2d(64, 48, 3, groups=2),
        nn.Linear(64, 64),
    ],
    ids=lambda layer: str(layer),
)
def test_every_kind_of_layer_has_gain_two(layer: nn.Module) -> None:
    dimensions = 0 if isinstance(layer, nn.Linear) else layer.weight.dim() - 2
    x = torch.randn(64, 64, *[20] * dimensions, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        response = initialise(layer)(x)
    for _ in range(dimensions):  # the rim of a transposed convolution sums over fewer numbers
        response = response.movedim(-1, 1)[:, 4:-4]
    assert float(response.square().mean()) == pytest.approx(2, rel=0.1)


def test_initialising_forgets_everything(pictures: Tensor) -> None:
    trained = models.vgg16_cifar()
    batch = nn.functional.interpolate(pictures, size=32)
    trained(batch)  # in training mode: batch norms take notice
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(1)
    before = copy.deepcopy(trained.state_dict())
    state = torch.get_rng_state()
    fresh = scratch(trained, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert fresh.training == trained.training
    assert all(torch.equal(value, before[key]) for key, value in trained.state_dict().items())
    again = initialise(models.vgg16_cifar(), seed=3)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in fresh.state_dict().items())
    other = scratch(trained, seed=4)
    assert not torch.equal(other.features[0].weight, fresh.features[0].weight)
    for module in fresh.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert torch.equal(module.running_mean, torch.zeros_like(module.running_mean))
            assert torch.equal(module.running_var, torch.ones_like(module.running_var))
            assert torch.equal(module.weight, torch.ones_like(module.weight))
            assert int(module.num_batches_tracked) == 0
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            assert torch.equal(module.bias, torch.zeros_like(module.bias))


def test_what_cannot_be_initialised_is_refused_before_anything_changes() -> None:
    for odd in (weight_norm(nn.Linear(4, 4)), nn.Embedding(4, 4), nn.MultiheadAttention(4, 2)):
        network = nn.Sequential(nn.Linear(4, 4), odd)
        before = network[0].weight.clone()
        with pytest.raises(LeanconvError, match=r"has the parameter .* initialise this network yourself"):
            initialise(network)
        assert torch.equal(network[0].weight, before)
