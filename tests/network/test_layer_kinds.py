"""Every kind of layer answers as torch's own layer does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from leanconv.network import reasons
from leanconv.network.layers.geometry import Geometry
from leanconv.network.layers.kinds import KINDS, LAYERS, REPLACEABLE, geometry_of, kind_of, kind_of_function
from leanconv.network.survey import survey

PLAIN = [
    nn.Conv1d(6, 8, 3, 2, 1, 2, bias=False),
    nn.Conv2d(6, 8, (3, 2), (2, 1), (1, 0), groups=2, padding_mode="reflect"),
    nn.Conv3d(6, 8, 2),
    nn.Linear(6, 8),
]
INPUTS = {"conv1d": (4, 6, 11), "conv2d": (4, 6, 9, 7), "conv3d": (4, 6, 3, 4, 5), "linear": (4, 10, 6)}


def test_a_kind_has_one_name() -> None:
    assert [kind.name for kind in KINDS.values()] == list(KINDS)
    assert {"conv1d", "conv2d", "conv3d", "linear"} <= set(KINDS)  # folders name them
    assert set(REPLACEABLE) < set(LAYERS)


@pytest.mark.parametrize("layer", PLAIN, ids=lambda layer: type(layer).__name__)
def test_a_layer_of_this_geometry_is_built_again(layer) -> None:
    kind, geometry = kind_of(layer), geometry_of(layer)
    built = kind.build(geometry, bias=layer.bias is not None)
    assert type(built) is type(layer)
    assert geometry_of(built) == geometry == Geometry.from_json(geometry.to_json())
    assert repr(built) == repr(layer)
    built.load_state_dict(layer.state_dict())
    x = torch.rand(INPUTS[kind.name])
    assert torch.equal(built(x), layer(x))


@pytest.mark.parametrize("layer", PLAIN, ids=lambda layer: type(layer).__name__)
def test_sizes_rows_and_macs_are_those_of_a_call(layer) -> None:
    kind, geometry = kind_of(layer), geometry_of(layer)
    x = torch.rand(INPUTS[kind.name])
    y = layer(x)
    in_size, out_size, repeats = kind.sizes(tuple(x.shape), tuple(y.shape), 4)
    assert kind.map_size(x) == in_size
    assert kind.map_size(y) == out_size == geometry.out_size(in_size)
    assert repeats == 1
    assert x.shape[kind.channel_axis(x.dim())] == geometry.in_channels
    assert kind.input_shape(geometry, in_size, 4) == tuple(x.shape)
    rows = kind.rows(y)
    assert rows.shape == (4, torch.Size(out_size).numel(), 8)
    assert torch.equal(rows[1].T.flatten() if kind.over_a_map else rows[1].flatten(), y[1].flatten())
    macs = kind.macs(tuple(layer.weight.shape), tuple(x.shape), tuple(y.shape), 4)
    assert macs == torch.Size(out_size).numel() * layer.weight.numel()


@pytest.mark.parametrize("layer", PLAIN, ids=lambda layer: type(layer).__name__)
def test_patches_at_a_window_times_the_filters_are_the_outputs(layer) -> None:
    kind, geometry = kind_of(layer), geometry_of(layer)
    if geometry.padding_mode != "zeros":
        geometry = Geometry(**{**vars(geometry), "padding_mode": "zeros"})
        layer = kind.build(geometry, bias=True)
    x = torch.rand(INPUTS[kind.name])
    y = layer(x)
    count = kind.rows(y).shape[1]
    index, inside = kind.window(geometry, kind.map_size(x), torch.arange(count).expand(4, count))
    patches = torch.stack([rows[places] for rows, places in zip(kind.rows(x), index, strict=True)])  # N x p x k x C
    if inside is not None:
        patches = patches * inside[..., None]
    weight = layer.weight.reshape(geometry.groups, 8 // geometry.groups, -1, index.shape[2])
    patches = patches.unflatten(3, (geometry.groups, -1))
    found = torch.einsum("npkgc,gdck->npgd", patches, weight).flatten(2)
    found = found if layer.bias is None else found + layer.bias
    torch.testing.assert_close(found, kind.rows(y))
    if geometry.margins(kind.map_size(x))[0] == geometry.margins(kind.map_size(x))[1]:
        bias = torch.zeros(8) if layer.bias is None else layer.bias
        torch.testing.assert_close(kind.compute(x, layer.weight, bias, geometry), y)


def test_transposed_convolutions_are_counted_and_named() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.up = nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 4, 2, 2, groups=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.conv_transpose2d(self.up(self.conv(x)), torch.ones(4, 3, 1, 1), None, 1, 0, 0, 2)

    found = survey(Net().eval(), torch.rand(2, 3, 8, 8))
    conv, up, call = found.layers
    assert (conv.name, up.name, call.type) == ("conv", "up", "conv_transpose2d")
    assert up.macs == 6 * 6 * 8 * 2 * 4  # every input position, 8 channels, 2 filters of its group, 2 x 2
    assert (call.macs, call.groups, call.out_channels) == (12 * 12 * 4 * 3, 2, 6)
    assert found.skipped["up"] == reasons.TRANSPOSED
    assert kind_of_function(torch.conv_transpose2d) is KINDS["conv_transpose2d"]
    assert kind_of_function(torch.relu) is None
