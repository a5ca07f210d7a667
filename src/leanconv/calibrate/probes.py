"""What is computed at a site: its responses at some positions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from leanconv.calibrate.positions import Chosen, conv_patches, outputs_at
from leanconv.network.layers.geometry import Geometry
from leanconv.network.layers.kinds import KINDS
from leanconv.network.sites import Site
from leanconv.solve import ResponseSpace, TwoStep

# Gathering one number of a patch costs about this many multiply-accumulates of a product.
GATHER = 32


@dataclass(frozen=True)
class Responses:
    """``y``: n x d. ``addend``: what the network adds to them before the activation, n x d, or None."""

    y: Tensor
    addend: Tensor | None = None

    def at(self, rows: Tensor | slice) -> Responses:
        return Responses(self.y[rows], None if self.addend is None else self.addend[rows])

    def part(self, number: int, groups: int) -> Responses:
        """Those of one group's filters."""
        if groups == 1:
            return self
        addend = None if self.addend is None else self.addend.chunk(groups, 1)[number].contiguous()
        return Responses(self.y.chunk(groups, 1)[number].contiguous(), addend)


@dataclass(frozen=True)
class Probe:
    """What to compute at a site from its input: ``weight`` (d x c x kernel, c of one group) and ``bias`` (d).

    ``split``: two factors the weight is the product of. ``own_output``: the layer's own output, batch norm included, is
    the response; the network may compute it. ``halfway``: not the responses are collected but what the second factor
    sees, n x (r k); ``responses`` makes responses of it.
    """

    site: Site
    weight: Tensor
    bias: Tensor
    split: TwoStep | None = None
    own_output: bool = False
    halfway: bool = False

    @cached_property
    def spaces(self) -> list[ResponseSpace]:
        """Where the responses can lie, one for each group."""
        return [ResponseSpace.of(filters.flatten(1)) for filters in self.weight.chunk(self.site.geometry.groups)]

    @property
    def width(self) -> int:
        """Numbers that are collected at a position."""
        return self.split.second[0].numel() if self.halfway and self.split is not None else len(self.weight)

    def positions(self, x: Tensor) -> int:
        """How many responses the layer has for one image (one row of ``x``)."""
        geometry = self.site.geometry
        return prod(geometry.out_size(KINDS[geometry.kind].map_size(x)))

    def outputs(self, y: Tensor, chosen: Chosen) -> Tensor:
        """An output of the layer at ``chosen`` positions: (N p) x d. A copy: the network may change it in place."""
        return outputs_at(y, self.site.geometry.kind, chosen).to(self.weight.dtype)

    def from_input(self, x: Tensor, chosen: Chosen) -> Tensor:
        """Responses to the layer's input ``x`` at ``chosen`` positions: (N p) x d.

        From gathered patches where few positions are chosen; where gathering them would cost more, from the whole
        layer, or its first factor.
        """
        if self.halfway:
            return self._halfway(x, chosen)
        geometry = self.site.geometry
        kind = KINDS[geometry.kind]
        sampled, every, d = chosen.at.shape[1], self.positions(x), geometry.out_channels
        ways = {"patches": sampled * geometry.patch * (GATHER * geometry.groups + d)}
        even = kind.over_a_map and _even(geometry, _size(x))
        if even:
            ways["whole"] = every * geometry.patch * d
        if even and self.split is not None:
            first, second = self.split.first, self.split.second
            between = prod(self._factor_geometries(_size(x))[0].out_size(_size(x)))
            ways["first"] = len(first) * (between * first[0].numel() + sampled * prod(second.shape[2:]) * (GATHER + d))
        way = min(ways, key=lambda way: ways[way])
        if way == "patches":
            return self._product(conv_patches(x, geometry, chosen), self.weight)
        if way == "first":
            return self.responses(self._halfway(x, chosen))
        y = kind.compute(x.to(self.weight.dtype), self.weight, self.bias, geometry)
        return outputs_at(y, kind.name, chosen, copy=False)

    def responses(self, halfway: Tensor) -> Tensor:
        """n x d, from what was collected ``halfway``."""
        assert self.split is not None
        return self._product(halfway, self.split.second)

    def _halfway(self, x: Tensor, chosen: Chosen) -> Tensor:
        """What the second factor sees at ``chosen`` positions: (N p) x (r k)."""
        assert self.split is not None
        geometry, first = self.site.geometry, self.split.first
        if not _even(geometry, _size(x)):
            patches = conv_patches(x, geometry, chosen).to(first.dtype)
            return self.split.seen(patches.reshape(len(patches), geometry.in_channels, *geometry.kernel))
        first_geometry, second_geometry = self._factor_geometries(_size(x))
        between = KINDS[geometry.kind].compute(x.to(first.dtype), first, None, first_geometry)
        return conv_patches(between, second_geometry, chosen)

    def _factor_geometries(self, in_size: tuple[int, ...]) -> tuple[Geometry, Geometry]:
        """Of the first factor and the second, for equal padding on both sides: each has the layer's kernel, stride,
        padding and dilation along its own dimensions. Along the others its filters have size 1."""
        assert self.split is not None
        g, first = self.site.geometry, self.split.first
        spans = tuple(size > 1 for size in first.shape[2:])

        def along(dimensions: tuple[bool, ...], in_channels: int) -> Geometry:
            def pick(values: tuple[int, ...], neutral: int) -> tuple[int, ...]:
                return tuple(value if own else neutral for value, own in zip(values, dimensions, strict=True))

            return replace(
                g,
                in_channels=in_channels,
                kernel=pick(g.kernel, 1),
                stride=pick(g.stride, 1),
                padding=pick(g.margins(in_size)[0], 0),
                padding_after=None,
                dilation=pick(g.dilation, 1),
            )

        return along(spans, g.in_channels), along(tuple(not own for own in spans), len(first))

    def _product(self, patches: Tensor, weight: Tensor) -> Tensor:
        """Patches n x (C k) -> responses n x d."""
        groups = self.site.geometry.groups
        x = patches.to(weight.dtype)
        if groups == 1:
            return torch.addmm(self.bias, x, weight.flatten(1).T)
        # Channels, and so the columns, are sorted by group.
        x = x.reshape(len(x), groups, -1).transpose(0, 1)  # g x n x (c k)
        filters = weight.reshape(groups, -1, x.shape[2]).transpose(1, 2)  # g x (c k) x d / g
        return (x @ filters).transpose(0, 1).flatten(1) + self.bias


@dataclass(frozen=True)
class PatchProbe(Probe):
    """What is collected is what the filters see, n x (c k): ``weight.flatten(1)`` makes responses of it."""

    @property
    def width(self) -> int:
        return self.site.geometry.patch

    def from_input(self, x: Tensor, chosen: Chosen) -> Tensor:
        return conv_patches(x, self.site.geometry, chosen).to(self.weight.dtype)


def _size(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape[2:])


def _even(geometry: Geometry, in_size: tuple[int, ...]) -> bool:
    """Whether torch's own convolution can pad like this."""
    before, after = geometry.margins(in_size)
    return geometry.padding_mode == "zeros" and before == after
