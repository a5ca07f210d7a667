"""A chain of convolutions without some of its channels: which go, and what the next convolution becomes. leanconv and
its distillation fit what is left to the original as it was."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from leanconv.calibrate.patches import Chosen, Positions, conv_patches, outputs_at
from leanconv.calibrate.probe import Probe
from leanconv.calibrate.samples import Samples
from leanconv.engine import Engine
from leanconv.network.sites import Site
from leanconv.network.survey import survey
from leanconv.solve.elimination import centred, elimination, numbers, of_inputs, refitted
from leanconv.solve.moments import Moments
from leanconv.train import goals

# No layer loses more of its channels than all but this share.
LEAST = 1 / 8
# Ridge, in units of the mean square of an input, for the choice of channels.
RIDGE = 1e-3
APART = 8  # of so many pieces of the pictures one is not seen by the refit


def folded(model: nn.Module) -> nn.Module:
    """A copy, with batch norms in the convolutions before them."""
    model = copy.deepcopy(model).eval()
    features = features_of(model)
    for at in range(len(features) - 1):
        convolution, norm = features[at], features[at + 1]
        if isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            features[at], features[at + 1] = fuse_conv_bn_eval(convolution, norm), nn.Identity()
    return model


def features_of(model: nn.Module) -> nn.Sequential:
    features = model.get_submodule("features")
    assert isinstance(features, nn.Sequential)
    return features


def filters_of(convolution: nn.Conv2d) -> tuple[Tensor, Tensor]:
    assert convolution.bias is not None
    return convolution.weight.detach(), convolution.bias.detach()


@dataclass(frozen=True)
class Pruned:
    """``kept``: which filters every convolution has, by its name."""

    model: nn.Module
    kept: dict[str, Tensor]
    macs: int
    seconds: float


class Pruning:
    """A chain of convolutions, some pictures, and what it answers at sampled positions of every convolution."""

    def __init__(self, model: nn.Module, pictures: Tensor, *, positions: int = 50, seed: int = 0):
        self.model = folded(model)
        features = features_of(self.model)
        self._places = [at for at, module in enumerate(features) if isinstance(module, nn.Conv2d)]
        found = survey(self.model, pictures[:1])
        sites = {site.name: site for site in found.sites}
        self.sites: list[Site] = [sites[f"features.{at}"] for at in self._places]
        self.macs = found.macs
        self.pieces = list(pictures.split(max(1, min(50, len(pictures) // APART))))
        self._positions = Positions(per_image=positions, images=len(pictures), seed=seed, device=pictures.device)
        self.answers: list[list[Tensor]] = [[] for _ in self._places]  # of a convolution, of a piece: n x d
        self.curves: list[tuple[int, list[float]]] = []
        self._listen()

    def _convolution(self, model: nn.Module, number: int) -> nn.Conv2d:
        found = features_of(model)[self._places[number]]
        assert isinstance(found, nn.Conv2d)
        return found

    def _chosen(self, number: int, piece: int) -> Chosen:
        first = sum(len(part) for part in self.pieces[:piece])
        return self._positions.choose(self.sites[number].positions, first, len(self.pieces[piece]), images=True)

    def _patches(self, number: int, piece: int, x: Tensor) -> Tensor:
        return conv_patches(x, self.sites[number].geometry, self._chosen(number, piece))

    @torch.no_grad()
    def _listen(self) -> None:
        """Answers of the original, and how much of each convolution's the filters before it can be spared for."""
        inputs = list(self.pieces)
        for number in range(len(self._places)):
            convolution = self._convolution(self.model, number)
            for piece, x in enumerate(inputs):
                y = convolution(x)
                self.answers[number].append(outputs_at(y, "conv2d", self._chosen(number, piece)))
                del y
            if number:
                channels = convolution.in_channels
                seen, unseen = self._moments(number, inputs)
                gram, cross, energy = self._around(seen.joined(unseen), convolution.weight)
                taps = len(gram) // channels
                _, growth = elimination(gram, cross, taps, max(1, round(LEAST * channels)))
                lost = torch.tensor(growth).cumsum(0) / float(energy)
                self.curves.append((channels, lost.tolist()))
            self._advance(self.model, number, inputs)

    def _advance(self, model: nn.Module, number: int, inputs: list[Tensor]) -> None:
        """From before a convolution to before the next."""
        if number + 1 < len(self._places):
            between = features_of(model)[self._places[number] : self._places[number + 1]]
            for piece, x in enumerate(inputs):
                inputs[piece] = between(x)

    def _moments(self, number: int, inputs: list[Tensor]) -> tuple[Moments, Moments]:
        """Of a convolution's inputs and the original's answers: of most pieces, and of the others."""
        found: list[Moments | None] = [None, None]
        for piece, x in enumerate(inputs):
            own = Moments.of(torch.cat([self._patches(number, piece, x), self.answers[number][piece]], 1))
            side = int(piece % APART == APART // 2)
            known = found[side]
            found[side] = own if known is None else known.joined(own)
        seen, unseen = found
        assert seen is not None
        assert unseen is not None
        return seen, unseen

    def _around(self, moments: Moments, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Centred, with a ridge around ``weight``: what goes costs its own square too, a little."""
        weight = weight.detach().double().flatten(1).T
        gram, cross, energy = centred(moments, len(weight))
        strength = RIDGE * gram.diagonal().mean()
        gram.diagonal().add_(strength)
        return gram, cross + strength * weight, energy

    def counted(self, keeps: list[int]) -> int:
        """MACs where every convolution keeps so many filters."""
        total, share = 0.0, 1.0
        for site, left in zip(self.sites, keeps, strict=True):
            before, share = share, left / site.geometry.out_channels
            total += site.cost.dense * before * share
        return round(total)

    def keeps(self, factor: float) -> list[int]:
        """Filters to keep for so many times fewer MACs: every convolution loses the same share of its energy, if the
        filters before it go and it is refitted. The last one's filters all stay."""

        def at(loss: float) -> list[int]:
            kept = [channels - sum(one <= loss for one in lost) for channels, lost in self.curves]
            return [*kept, self.sites[-1].geometry.out_channels]

        levels = sorted(one for _, lost in self.curves for one in lost)
        low, high = 0, len(levels) - 1  # the least level that does
        while low < high:
            middle = (low + high) // 2
            if self.macs / self.counted(at(levels[middle])) >= factor:
                high = middle
            else:
                low = middle + 1
        return at(levels[low])

    @torch.no_grad()
    def prune(self, keeps: list[int]) -> Pruned:
        """From the first convolution to the last: filters go, and the next convolution is refitted to give the
        original's answers from what the network has become."""
        started = time.perf_counter()
        model = copy.deepcopy(self.model)
        inputs, changed = list(self.pieces), False
        kept = {site.name: torch.arange(site.geometry.out_channels, device=inputs[0].device) for site in self.sites}
        for number in range(len(self._places) - 1):
            self._advance(model, number, inputs)
            giver, taker = (self._convolution(model, at) for at in (number, number + 1))
            changed |= keeps[number] < giver.out_channels
            if not changed:
                continue
            seen, unseen = self._moments(number + 1, inputs)
            weight = taker.weight.double().flatten(1).T
            taps = len(weight) // giver.out_channels
            gram, cross, _ = self._around(seen.joined(unseen), taker.weight)
            gone, _ = elimination(gram, cross, taps, keeps[number])
            stays = torch.ones(giver.out_channels, dtype=torch.bool)
            stays[gone] = False
            stay = stays.nonzero()[:, 0].to(weight.device)
            index = numbers(stay, taps)
            few = (of_inputs(moments, index, len(weight)) for moments in (seen, unseen))
            found, bias = refitted(*few, weight[index])
            shape = (taker.out_channels, len(stay), *taker.kernel_size)
            resize(giver, *(tensor[stay] for tensor in filters_of(giver)))
            resize(taker, found.T.reshape(shape), bias)
            kept[self.sites[number].name] = stay
            inputs = [x[:, stay] for x in inputs]
        if inputs[0].is_cuda:
            torch.cuda.synchronize()
        return Pruned(model, kept, self.counted([len(one) for one in kept.values()]), time.perf_counter() - started)

    @contextmanager
    def answering(self, kept: dict[str, Tensor]) -> Iterator[None]:
        """leanconv fits a pruned network's layers to what this one, the original, answers with the filters kept."""
        probes: dict[str, Probe] = {}
        for number, site in enumerate(self.sites):
            stay = kept[site.name]
            weight, bias = filters_of(self._convolution(self.model, number))
            geometry = replace(site.geometry, out_channels=len(stay))
            probes[site.name] = Probe(replace(site, geometry=geometry), weight[stay], bias[stay])
        plain = Engine.solve

        def fitted(
            engine: Engine,
            wanted: dict[str, Probe],
            dense: list[Probe],
            targets: Samples,
            **others: Callable[..., Any],
        ) -> dict[str, float]:
            targets.close()
            mine = engine.responses(self.model, [probes[name] for name in wanted], "original network")
            return plain(engine, wanted, dense, mine, **others)

        with patch.object(Engine, "solve", fitted):
            yield


@contextmanager
def showing(original: nn.Module, kept: dict[str, Tensor]) -> Iterator[None]:
    """A distillation sees the maps of those filters only that a pruned network has kept."""
    plain = goals._watched
    whole = {name: layer.out_channels for name, layer in original.named_modules() if isinstance(layer, nn.Conv2d)}

    @contextmanager
    def watched(network: nn.Module, places: Sequence[str]) -> Iterator[goals.Maps]:
        with plain(network, places) as seen:
            yield seen
        for place, stay in kept.items():
            seen[place] = [maps[:, stay] if maps.shape[1] == whole[place] else maps for maps in seen.get(place, [])]

    with patch.object(goals, "_watched", watched):
        yield


def resize(convolution: nn.Conv2d, weight: Tensor, bias: Tensor) -> None:
    convolution.out_channels, convolution.in_channels = weight.shape[:2]
    dtype = convolution.weight.dtype
    convolution.weight = nn.Parameter(weight.to(dtype).contiguous())
    convolution.bias = nn.Parameter(bias.to(dtype).contiguous())
