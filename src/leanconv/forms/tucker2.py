"""(1 x 1, c') + (k x k, d') + (1 x 1, d): Tucker-2, fewer channels on both sides of the k x k filters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from leanconv.forms.base import RESPONSES, Axis, Form, Ranks
from leanconv.network.layers.geometry import Cost, Geometry
from leanconv.network.layers.kinds import KINDS
from leanconv.network.layers.modules import pad_module, plain_layer, pointwise
from leanconv.solve import Metric, SeenBasis, spatial_basis_as_seen


@dataclass(frozen=True)
class PointwiseSplit:
    """``first``: rank x c x 1 x 1, then ``second``: d x rank x kernel."""

    first: Tensor
    second: Tensor

    def product(self) -> Tensor:
        """The d x c x kernel filters the pair is equal to."""
        return torch.einsum("rc,drk->dck", self.first.flatten(1), self.second.flatten(2)).reshape(
            len(self.second), self.first.shape[1], *self.second.shape[2:]
        )

    def seen(self, patches: Tensor) -> Tensor:
        """What ``second`` sees of ``patches`` (n x c x kernel): n x (rank k)."""
        return torch.einsum("nck,rc->nrk", patches.flatten(2), self.first.flatten(1)).flatten(1)


@dataclass(frozen=True)
class InputBasis:
    """Filters by input channel (c x (d k)), its left singular vectors and squared singular values."""

    matrix: Tensor
    vectors: Tensor
    values: Tensor
    shape: torch.Size
    dtype: torch.dtype

    def split(self, rank: int) -> PointwiseSplit:
        """Truncate to ``rank``. Singular values are shared evenly, so both factors survive half precision."""
        d, c, *kernel = self.shape
        u = self.vectors[:, :rank]
        rest = u.T @ self.matrix
        balance = rest.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
        first = (u * balance).T.reshape(rank, c, *[1] * len(kernel))
        second = (rest / balance[:, None]).reshape(rank, d, *kernel).transpose(0, 1)
        return PointwiseSplit(first.to(self.dtype), second.contiguous().to(self.dtype))


def input_basis(weight: Tensor) -> InputBasis:
    """Decompose ``weight`` (d x c x kernel) along its input channels. Cost O(c^2 (c + d k)), in float64."""
    matrix = weight.to(torch.float64).transpose(0, 1).flatten(1)
    values, vectors = torch.linalg.eigh(matrix @ matrix.T)
    limit = min(matrix.shape)
    return InputBasis(matrix, vectors.flip(1), values.flip(0).clamp_min(0.0)[:limit], weight.shape, weight.dtype)


@dataclass(frozen=True)
class SeenInputBasis:
    """A split by columns of one channel each, of a kernel in one line."""

    columns: SeenBasis
    kernel: tuple[int, ...]

    @property
    def values(self) -> Tensor:
        return self.columns.values

    def split(self, rank: int) -> PointwiseSplit:
        found = self.columns.split(rank)
        second = found.second.reshape(*found.second.shape[:2], *self.kernel)
        return PointwiseSplit(found.first.reshape(rank, -1, *[1] * len(self.kernel)), second)


def input_basis_as_seen(weight: Tensor, patches: Tensor, metric: Metric | None = None) -> SeenInputBasis | None:
    """``input_basis`` for what the layer sees: a patch has k columns of c numbers."""
    columns = spatial_basis_as_seen(weight.flatten(2)[:, :, None], patches, metric)
    return None if columns is None else SeenInputBasis(columns, tuple(weight.shape[2:]))


INPUTS = Axis(
    "inputs",
    "c'",
    "input channels",
    lambda g: min(g.in_channels, g.out_channels * prod(g.kernel)),
    input_basis,
    input_basis_as_seen,
)


@dataclass(frozen=True)
class Tucker2(Form):
    name = "tucker2"
    about = "1 x 1 filters to c', k x k to d', then 1 x 1; ranks are c' x d'"
    axes = (INPUTS, RESPONSES)
    pointwise_end = True

    def applies(self, geometry: Geometry) -> bool:
        return KINDS[geometry.kind].over_a_map and geometry.groups == 1 and max(geometry.kernel) > 1

    def macs(self, cost: Cost, ranks: Ranks) -> int:
        inputs, responses = ranks
        return inputs * (cost.inputs + cost.inner * responses) + responses * cost.expand

    def first_macs(self, cost: Cost, ranks: Ranks) -> int:
        return ranks[0] * cost.inputs

    def modules(self, geometry: Geometry, ranks: Ranks) -> dict[str, nn.Module | None]:
        inputs, responses = ranks
        core = replace(geometry, in_channels=inputs)
        return {
            "reduce": pointwise(geometry, geometry.in_channels, inputs, bias=False),
            "pad": pad_module(core),  # 1 x 1 filters without a bias make zeros of zeros: padding may come behind them
            "core": plain_layer(core, responses, bias=False),
            "expand": pointwise(geometry, responses, geometry.out_channels),
        }
