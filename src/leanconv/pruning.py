"""Channels that the next layer hardly misses, taken away before the layers are approximated.

The filters of a layer go that the convolution behind it, refitted by least squares, misses least
(``solve.elimination``). One pass of the original tells all: second moments of such convolutions' patches and responses.
How many filters a layer keeps is chosen so that all convolutions lose the same share of their responses' energy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import Batch, Batches
from leanconv.calibrate.observe import chosen_at
from leanconv.calibrate.patches import Positions, conv_patches
from leanconv.calibrate.probe import Probe
from leanconv.entrance import copied
from leanconv.network.fold import Filters, without_norm
from leanconv.network.geometry import Geometry
from leanconv.network.prunable import Pair
from leanconv.network.recording import tensors
from leanconv.network.replace import Factors, dense_modules, filled, put
from leanconv.network.sites import Site, Survey
from leanconv.solve.elimination import centred, elimination, numbers, of_inputs, refitted
from leanconv.solve.moments import Gathering, Moments

# No layer loses more of its filters than all but this share, and what the next one loses of its energy with them ends
# about here: beyond it nothing is gained.
LEAST, MOST = 1 / 8, 0.05
# Ridge, in units of the mean square of an input, for the choice of channels.
RIDGE = 1e-3
# Of so many images one does not take part in a refit, and says how strong its ridge is to be, and one is left out
# altogether until it is known how much to prune.
EACH, UNSEEN, JUDGING = 8, 3, 7


@dataclass(frozen=True)
class Order:
    """A giver's filters in the order they go, and the share of its taker's energy lost when each has gone."""

    gone: tuple[int, ...]
    lost: tuple[float, ...]


@dataclass(frozen=True)
class Pruned:
    """A network without some channels. ``sites``: those of the original that changed; ``geometries``: what they have
    become; ``kept``: the filters that stay, of layers that lost some; ``lost``: the share of their responses' energy
    that layers lost with their inputs; ``macs``: what is left of the original's."""

    model: nn.Module
    sites: dict[str, Site]
    geometries: dict[str, Geometry]
    kept: dict[str, Tensor]
    lost: dict[str, float]
    macs: int


@dataclass
class Pruning:
    """What can go from a network, and what that costs."""

    original: nn.Module
    filters: Filters
    pairs: Sequence[Pair]
    survey: Survey
    dtype: torch.dtype

    def measure(self, batches: Batches, positions: Positions, device: torch.device, step: Callable[[], None]) -> None:
        """One pass of the original over the images."""
        self._seen = {pair.taker.name: (Gathering(), Gathering(), Gathering()) for pair in self.pairs}
        with torch.no_grad():
            for batch in batches:
                with self._listening(batch, positions):
                    self.original(batch.on(device))
                step()

    @contextmanager
    def _listening(self, batch: Batch, positions: Positions) -> Iterator[None]:
        handles = []
        for pair in self.pairs:
            probe = Probe(pair.taker, *self.filters.of(pair.taker, self.dtype))

            def before(module: nn.Module, args: Any, kwargs: Any, probe: Probe = probe) -> None:
                self._add(probe, next(tensors((args, kwargs))), batch, positions)

            layer = self.original.get_submodule(pair.taker.name)
            handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _add(self, probe: Probe, x: Tensor, batch: Batch, positions: Positions) -> None:
        """A batch's patches and responses, a row a position: (c k + d) numbers."""
        chosen = chosen_at(probe, x, batch, positions)
        patches = conv_patches(x, probe.site.geometry, chosen).to(self.dtype)
        rows = torch.cat([patches, torch.addmm(probe.bias, patches, probe.weight.flatten(1).T)], 1)
        image = torch.arange(batch.first, batch.first + len(x), device=x.device) % EACH
        image = image.repeat_interleave(chosen.at.shape[1])
        unseen, judging = image == UNSEEN, image == JUDGING
        for side, mine in zip(self._seen[probe.site.name], (~unseen & ~judging, unseen, judging), strict=True):
            side.add(rows[mine])

    def choose(self, step: Callable[[], None], *, everything: bool = False) -> None:
        """The order in which every giver's filters go, by all images or by those that do not judge. A layer behind maps
        that never change has nothing to say about them, and they stay."""
        self._everything = everything
        self._orders: dict[str, Order] = {}
        for pair in self.pairs:
            weight = self._filters(pair.taker)
            channels = pair.giver.geometry.out_channels
            seen, unseen = self._sides(pair)
            gram, cross, energy = centred(seen.joined(unseen), len(weight))
            strength = RIDGE * gram.diagonal().mean()
            if not float(strength) > 0 or not float(energy) > 0:
                self._orders[pair.giver.name] = Order((), ())
                step()
                continue
            gram.diagonal().add_(strength)  # around the weights there are: what goes costs its own square too, a little
            gone, growth = elimination(
                gram,
                cross + strength * weight,
                len(weight) // channels,
                max(1, round(LEAST * channels)),
                MOST * float(energy),
            )
            lost = torch.tensor(growth).cumsum(0) / float(energy)
            self._orders[pair.giver.name] = Order(tuple(gone), tuple(lost.tolist()))
            step()

    def forget(self) -> None:
        """What was measured, which is large."""
        self._seen.clear()

    def _filters(self, taker: Site) -> Tensor:
        """(c k) x d, in double precision."""
        return self.filters.of(taker, self.dtype)[0].double().flatten(1).T

    def _sides(self, pair: Pair) -> tuple[Moments, Moments]:
        """Of images that take part in a refit, and of the others; the same where there are none."""
        seen, unseen, judging = (side.moments for side in self._seen[pair.taker.name])
        assert seen is not None
        if self._everything and judging is not None:
            seen = seen.joined(judging)
        return seen, unseen or seen

    def keeps(self, factor: float) -> dict[str, int]:
        """Filters every giver keeps, for so many times fewer MACs or as near as it goes."""

        def at(loss: float) -> dict[str, int]:
            return {
                pair.giver.name: pair.giver.geometry.out_channels
                - sum(one <= loss for one in self._orders[pair.giver.name].lost)
                for pair in self.pairs
            }

        levels = sorted({one for order in self._orders.values() for one in order.lost}) or [0.0]
        low, high = 0, len(levels) - 1  # the least level that does
        while low < high:
            middle = (low + high) // 2
            if self.survey.macs / self.macs(at(levels[middle])) >= factor:
                high = middle
            else:
                low = middle + 1
        return at(levels[low])

    def macs(self, keeps: Mapping[str, int]) -> int:
        """Of the network where givers keep so many filters."""
        total = float(self.survey.macs)
        shares: dict[str, float] = {}
        for pair in self.pairs:
            share = keeps[pair.giver.name] / pair.giver.geometry.out_channels
            for name in (pair.giver.name, pair.taker.name):
                shares[name] = shares.get(name, 1.0) * share
        for layer in self.survey.layers:
            total -= layer.macs * (1 - shares.get(layer.name, 1.0))
        return round(total)

    def pruned(self, keeps: Mapping[str, int]) -> Pruned:
        """The network with so many filters of every giver, and the convolutions behind them refitted."""
        weights: dict[str, tuple[Tensor, Tensor]] = {}
        kept: dict[str, Tensor] = {}
        lost: dict[str, float] = {}
        sites = {site.name: site for pair in self.pairs for site in (pair.giver, pair.taker)}

        def now(site: Site) -> tuple[Tensor, Tensor]:
            return weights.get(site.name) or self.filters.of(site, self.dtype)

        for pair in self.pairs:
            channels, gone = pair.giver.geometry.out_channels, self._orders[pair.giver.name].gone
            away = channels - keeps[pair.giver.name]
            if not away:
                continue
            stays = torch.ones(channels, dtype=torch.bool)
            stays[list(gone[:away])] = False
            weights[pair.taker.name] = self._refit(pair, stays, now(pair.taker))
            lost[pair.taker.name] = self._orders[pair.giver.name].lost[away - 1]
            kept[pair.giver.name] = stay = stays.nonzero()[:, 0].to(now(pair.giver)[0].device)
        # Rows last: a layer that gives and takes is refitted with all its filters.
        for name, stay in kept.items():
            weight, bias = now(sites[name])
            weights[name] = weight[stay], bias[stay]
        model, geometries = copied(self.original), {}
        for name, (weight, bias) in weights.items():
            site = sites[name]
            geometry = replace(site.geometry, out_channels=weight.shape[0], in_channels=weight.shape[1])
            geometries[name] = geometry
            self._put(model, site, geometry, Factors((weight,), bias))
        return Pruned(model, {name: sites[name] for name in weights}, geometries, kept, lost, self.macs(keeps))

    def _refit(self, pair: Pair, stays: Tensor, now: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The taker's filters and bias for the inputs that stay."""
        weight = self._filters(pair.taker)
        stay = stays.nonzero()[:, 0].to(weight.device)
        index = numbers(stay, len(weight) // len(stays))
        seen, unseen = (of_inputs(moments, index, len(weight)) for moments in self._sides(pair))
        found, bias = refitted(seen, unseen, weight[index])
        shape = (now[0].shape[0], len(stay), *pair.taker.geometry.kernel)
        return found.T.reshape(shape).to(self.dtype), bias.to(self.dtype)

    def _put(self, model: nn.Module, site: Site, geometry: Geometry, factors: Factors) -> None:
        old = model.get_submodule(site.name)
        assert isinstance(old.weight, Tensor)
        new = filled(lambda: dense_modules(geometry), factors, old.weight).get_submodule("whole")
        new.requires_grad_(any(parameter.requires_grad for parameter in old.parameters()))
        put(model, site.name, new.train(old.training))
        if site.batch_norm is not None:
            put(model, site.batch_norm, without_norm(model.get_submodule(site.batch_norm)))
