"""The output of a network on a few images, and how far it moves when one layer is approximated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import Batch
from leanconv.calibrate.probes import Probe
from leanconv.calibrate.streams import Streams, collected
from leanconv.errors import LeanconvError
from leanconv.forms import Axis
from leanconv.forms.replace import Change, replace
from leanconv.network.function_trace import tensors
from leanconv.network.layers.modules import Factors, put
from leanconv.network.user_model import copied
from leanconv.ranks.sensitivity.merit import Points
from leanconv.ranks.spectra import Spectra
from leanconv.solve import pca, reduced_rank
from leanconv.system.random_state import untouched_rng

# The largest change that is reported, also for a network that returns NaN once a layer is approximated.
FARTHEST = 1e3
# The share of an output's variance over the images that is common to all its columns. Up to SCORES they are taken for
# scores of classes, where a number added to all changes nothing; from NUMBERS on for numbers that each mean something.
# A classifier has about a third in common (VGG-16), two independent columns have a half.
SCORES, NUMBERS = 0.4, 0.6
# Responses of a layer that a split is corrected and judged by.
ROWS = 8192


class Projected:
    """Filters whose responses are the original's on their leading components: y ~ U U^T (y - mean) + mean."""

    def __init__(self, probe: Probe, y: Tensor, most: int):
        """Components of ``y`` (n x d), ``most`` of them."""
        groups = probe.site.geometry.groups
        self._filters = list(zip(probe.weight.chunk(groups), probe.bias.chunk(groups), strict=True))
        parts = list(zip(y.chunk(groups, 1), probe.spaces, strict=True))
        self._bases = [pca(part, most, space=space).p for part, space in parts]
        self._means = [part.mean(0, dtype=torch.float64).to(part.dtype) for part, _ in parts]

    def factors(self, rank: int) -> Factors:
        """Of the channel form."""
        reduce, expand, bias = [], [], []
        for (weight, b), basis, mean in zip(self._filters, self._bases, self._means, strict=True):
            u = basis[:, :rank]
            reduce.append((u.T @ weight.flatten(1)).reshape(rank, *weight.shape[1:]))
            expand.append(u)
            bias.append(mean + u @ (u.T @ (b - mean)))
        return Factors((torch.cat(reduce), torch.cat(expand)), torch.cat(bias))


class Answer(NamedTuple):
    """A tensor the network returned, float64. ``rows``: one for every image, or one in all where the first dimension is
    not that of the images. ``matrix``: whether the tensor was a matrix."""

    rows: Tensor
    matrix: bool

    @classmethod
    def of(cls, output: Tensor, size: int) -> Answer:
        rows = output.detach().to(torch.float64)
        by_image = rows.dim() > 0 and len(rows) == size
        return cls(rows.reshape(size if by_image else 1, -1), rows.dim() == 2)


class Listener:
    """The original's outputs on some ``images``, and how much they change with factors in place of a layer."""

    def __init__(self, original: nn.Module, images: list[Batch], device: torch.device, seed: int):
        self._network = copied(original, share=True)
        self._images, self._device, self._seed = images, device, seed
        answers = self._answers()
        self._free = [_free(answer.rows) if answer.matrix else 0.0 for answer in answers]
        self._reference = self._compared(answers)
        sound = all(bool(rows.isfinite().all()) for rows in self._reference)
        if not sound or not any(bool(rows.any()) for rows in self._reference):
            raise LeanconvError(
                "ranks='sensitivity' compares outputs, and this network's are all 0 or not finite on these images; use "
                "ranks='energy'."
            )

    def change(self, form: Change, factors: Factors) -> float:
        """Length of the output's change over its own length: the mean over the tensors it consists of."""
        with _replaced(self._network, form, factors):
            answers = self._compared(self._answers())
        if [rows.shape for rows in answers] != [rows.shape for rows in self._reference]:
            raise LeanconvError(
                f"ranks='sensitivity' compares outputs, and this network's have other shapes once layer {form.name!r} "
                "is approximated; use ranks='energy'."
            )
        pairs = [(a, b) for a, b in zip(answers, self._reference, strict=True) if b.any()]
        moved = [float((a - b).norm(dim=1).sum() / b.norm(dim=1).sum()) for a, b in pairs]
        mean = sum(moved) / len(moved)
        return min(mean, FARTHEST) if mean == mean else FARTHEST

    def _compared(self, answers: list[Answer]) -> list[Tensor]:
        """The answers without the part that is common to all columns. Their number may have changed: ``change`` refuses
        that."""
        shares = itertools.chain(self._free, itertools.repeat(0.0))
        return [
            rows - free * rows.mean(1, keepdim=True) if free else rows
            for (rows, _), free in zip(answers, shares, strict=False)
        ]

    def _answers(self) -> list[Answer]:
        """One for every tensor the network returns; one for every batch where sizes differ."""
        found: list[list[Answer]] = []
        with torch.no_grad(), untouched_rng(self._seed):
            for batch in self._images:
                output = self._network(batch.on(self._device))
                found.append([Answer.of(one, batch.size) for one in tensors(output) if one.is_floating_point()])
        if len({tuple(answer.rows.shape[1] for answer in batch) for batch in found}) > 1:
            return [Answer(answer.rows.reshape(1, -1), False) for batch in found for answer in batch]
        return [Answer(torch.cat([a.rows for a in parts]), parts[0].matrix) for parts in zip(*found, strict=True)]


def _free(rows: Tensor) -> float:
    """How much of a change common to all columns of ``rows`` (images x columns) is ignored: all of it for scores of
    classes, as softmax does not see it, nothing for a regressor, and a share for outputs between the two."""
    if rows.shape[1] == 1:
        return 0.0
    varying = rows - rows.mean(0)
    common, whole = float(rows.shape[1] * varying.mean(1).square().sum()), float(varying.square().sum())
    share = common / whole if whole > 0 else 0.0
    return min(1.0, max(0.0, (NUMBERS - share) / (NUMBERS - SCORES)))


@contextmanager
def _replaced(network: nn.Module, change: Change, factors: Factors) -> Iterator[None]:
    before = {path: network.get_submodule(path) for path in (change.name, change.batch_norm) if path is not None}
    try:
        replace(network, change, factors)
        yield
    finally:
        for path, module in before.items():
            put(network, path, module)


def split_losses(
    streams: Streams,
    spectra: Spectra,
    axis: Axis,
    images: list[Batch],
    ranks: dict[str, list[int]],
    step: Callable[[], None],
    *,
    corrected: bool,
) -> Iterator[tuple[str, Points]]:
    """(energy of filters lost, energy of responses lost) of every layer at these ``ranks``. Two passes of ``images``.

    ``corrected``: a regression on half of the images maps a split's responses to the original's, as the solver will,
    and the other half shows what is still lost: in VGG-16 a fifth to two thirds of what a split alone loses.
    """
    most = {name: max(some) for name, some in ranks.items() if some}
    whole = collected(streams, images, {name: spectra.dense[name] for name in most}, ROWS)
    probes = {name: split_probe(spectra, name, axis, rank) for name, rank in most.items()}
    halves = collected(streams, images, probes, ROWS)
    for name, some in ranks.items():
        found, energies = [], spectra.candidates[name].spectrum(axis)
        for rank in some:
            assert energies is not None
            probe = split_probe(spectra, name, axis, rank)
            # The split of a smaller rank is part of that of a larger one.
            x = halves.get(name).y.unflatten(1, (most[name], -1))[:, :rank].flatten(1)
            loss = split_loss(probe, whole.get(name).y, probe.responses(x), corrected=corrected)
            found.append((1.0 - energies.kept[rank], loss))
            step()
        yield name, tuple(found)
    whole.close()
    halves.close()


def split_loss(probe: Probe, y: Tensor, given: Tensor, *, corrected: bool) -> float:
    """Share of the energy of ``y`` (n x d) that ``given`` (n x d) does not explain. ``corrected``: by a regression,
    where it helps: on few rows it may not."""
    half, full = len(y) // 2, probe.site.geometry.channel_limit
    ways = [given[half:]]
    if corrected:
        ways.append(reduced_rank(y[:half], given[:half], full, space=probe.spaces[0])(given[half:]))
    y = y[half:]
    energy = float((y - y.mean(0)).double().square().sum())
    left = min(float((y - way).double().square().sum()) for way in ways)
    return left / energy if energy > 0 else 0.0


def split_probe(spectra: Spectra, name: str, axis: Axis, rank: int) -> Probe:
    """A probe of the product of a split that collects the input of its second factor."""
    dense, split = spectra.dense[name], spectra.split(name, axis, rank)
    return Probe(dense.site, split.product(), dense.bias, split, halfway=True)
