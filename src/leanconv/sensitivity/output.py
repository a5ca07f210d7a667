"""The output of a network on a few images, and how far it moves when one layer is approximated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import Batch
from leanconv.calibrate.probe import Probe
from leanconv.entrance import copied, untouched_rng
from leanconv.errors import LeanconvError
from leanconv.network.recording import tensors
from leanconv.network.replace import Change, Factors, put, replace
from leanconv.solve import pca

# What is said of a network that answers with NaN, or something as far off, once a layer is approximated.
FARTHEST = 1e3


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


class Listener:
    """The original's answers on some ``images``, and what becomes of them with factors in place of a layer."""

    def __init__(self, original: nn.Module, images: list[Batch], device: torch.device, seed: int):
        self._network = copied(original, share=True)
        self._images, self._device, self._seed = images, device, seed
        self._reference = self._answers()
        sound = all(bool(rows.isfinite().all()) for rows in self._reference)
        if not sound or not any(bool(rows.any()) for rows in self._reference):
            raise LeanconvError(
                "ranks='sensitivity' compares outputs, and this network's are all 0 or not finite on these images; use "
                "ranks='energy'."
            )

    def change(self, form: Change, factors: Factors) -> float:
        """Of the output, in length, relative to its own: the mean over the tensors it consists of."""
        with _replaced(self._network, form, factors):
            answers = self._answers()
        if [rows.shape for rows in answers] != [rows.shape for rows in self._reference]:
            raise LeanconvError(
                f"ranks='sensitivity' compares outputs, and this network's have other shapes once layer {form.name!r} "
                "is approximated; use ranks='energy'."
            )
        pairs = [(a, b) for a, b in zip(answers, self._reference, strict=True) if b.any()]
        moved = [float((a - b).norm(dim=1).sum() / b.norm(dim=1).sum()) for a, b in pairs]
        mean = sum(moved) / len(moved)
        return min(mean, FARTHEST) if mean == mean else FARTHEST

    def _answers(self) -> list[Tensor]:
        """A matrix for every tensor the network returns, an image a row; for every batch, where sizes differ."""
        found: list[list[Tensor]] = []
        with torch.no_grad(), untouched_rng(self._seed):
            for batch in self._images:
                output = self._network(batch.on(self._device))
                found.append([_rows(one, batch.size) for one in tensors(output) if one.is_floating_point()])
        if len({tuple(rows.shape[1] for rows in batch) for batch in found}) > 1:
            return [rows.reshape(1, -1) for batch in found for rows in batch]
        return [torch.cat(rows) for rows in zip(*found, strict=True)]


def _rows(output: Tensor, size: int) -> Tensor:
    """An image a row, where the first dimension tells; else one in all. A classifier's answer is the same whatever is
    added to all its classes."""
    rows = output.detach().to(torch.float64)
    rows = rows.reshape(size, -1) if rows.dim() and len(rows) == size else rows.reshape(1, -1)
    return rows - rows.mean(1, keepdim=True) if output.dim() == 2 and rows.shape[1] > 1 else rows


@contextmanager
def _replaced(network: nn.Module, change: Change, factors: Factors) -> Iterator[None]:
    before = {path: network.get_submodule(path) for path in (change.name, change.batch_norm) if path is not None}
    try:
        replace(network, change, factors)
        yield
    finally:
        for path, module in before.items():
            put(network, path, module)
