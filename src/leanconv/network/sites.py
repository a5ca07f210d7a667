"""The layers of a network, and among them the sites, which can be accelerated."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from leanconv.errors import unknown_name, warn
from leanconv.network import reasons
from leanconv.network.activations import ActivationSpec
from leanconv.network.layers.geometry import Cost, Geometry, Size


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One convolution or linear layer as it ran: sizes are of one image (1 x rows for a Linear)."""

    name: str
    type: str
    in_channels: int
    out_channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    groups: int
    out_size: tuple[int, ...]
    macs: int
    parameters: int


@dataclass(frozen=True, kw_only=True)
class Site:
    """A layer and what follows it up to its activation: batch norm, tensors added."""

    name: str
    geometry: Geometry
    in_size: Size
    out_size: Size
    cost: Cost
    batch_norm: str | None
    activation: ActivationSpec
    adds: int  # tensors added to the response before the activation (a shortcut); 0 for none
    index: int  # order of execution
    feeds: str | None = None  # the one layer the response goes into as it is
    calls: int = 1  # maps the layer runs on, one after the other (a detector's levels); sizes are those of the first

    @property
    def positions(self) -> int:
        """Responses one image gives, as seen in the survey."""
        return prod(self.out_size)

    @property
    def tail(self) -> str:
        """The module whose output is the response: the batch norm folded in, or the layer itself."""
        return self.batch_norm or self.name


@dataclass(frozen=True, kw_only=True)
class Survey:
    """One observed run: every layer that counts, in order of execution; the sites, in the order to solve them; and why
    the other layers are skipped.

    The order to solve is that of execution, except that a convolution on a shortcut comes before the layer it is
    added to, so that the latter is fitted to the shortcut as it will be.
    """

    layers: tuple[Layer, ...]
    sites: tuple[Site, ...]
    skipped: dict[str, str]
    first: str | None  # the first convolution of the network

    @property
    def macs(self) -> int:
        return sum(layer.macs for layer in self.layers)

    def counted_as(self, real: Mapping[str, int]) -> Survey:
        """With the ``real`` MACs of layers: a detector looks at more boxes than the survey did."""
        factors = {layer.name: real[layer.name] / layer.macs for layer in self.layers if real.get(layer.name)}
        return replace(
            self,
            layers=tuple(replace(layer, macs=real.get(layer.name) or layer.macs) for layer in self.layers),
            sites=tuple(replace(site, cost=site.cost.times(factors.get(site.name, 1.0))) for site in self.sites),
        )

    def within(self, part: str) -> Survey:
        """The layers in the module at path ``part``; the others are neither counted nor changed."""
        inside = [layer for layer in self.layers if f"{layer.name}.".startswith(f"{part}.")]
        names = {layer.name for layer in inside}
        outside = {layer.name: reasons.OUTSIDE for layer in self.layers if layer.name not in names}
        sites = tuple(site for site in self.sites if site.name in names)
        return replace(self, layers=tuple(inside), sites=sites, skipped={**self.skipped, **outside})


def apply_skip(
    skip: Collection[str] | None,
    survey: Survey,
    sites: dict[str, Site],
    skipped: dict[str, str],
    *,
    named: Collection[str],
) -> None:
    """Move the layers of ``skip`` from ``sites`` to ``skipped``; None means the first convolution, unless ``named``."""
    known = [layer.name for layer in survey.layers]
    if skip is None:
        if survey.first in sites and survey.first not in named:
            del sites[survey.first]
            skipped[survey.first] = reasons.FIRST
        return
    for name in skip:
        if name not in known and name not in skipped:
            raise unknown_name(name, known, what="layer", where="skip")
        if sites.pop(name, None) is not None:
            skipped[name] = reasons.ASKED


def in_order(skipped: dict[str, str], survey: Survey) -> dict[str, str]:
    """In order of execution; layers that did not run come last."""
    order = {layer.name: index for index, layer in enumerate(survey.layers)}
    return dict(sorted(skipped.items(), key=lambda item: order.get(item[0], len(order))))


def linear_fits(sites: Iterable[Site]) -> dict[str, str]:
    """Sites that can only be fitted linearly although an activation follows them: name -> why."""
    return {site.name: site.activation.note for site in sites if site.activation.note}


def warn_of_linear_fits(sites: Iterable[Site]) -> None:
    for line in reasons.by_reason(linear_fits(sites)):
        warn(f"fitted linearly: {line}.")
