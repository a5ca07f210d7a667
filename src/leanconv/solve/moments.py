"""Sums over samples in float64: second moments, made invertible without changing the answer, and what a regression
needs beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Pseudo-samples are this share of the mean response variance. Dead or duplicate filters, or fewer samples than
# channels, leave directions without samples; a share this small orders those and changes nothing in directions with
# samples (real spectra end around 1e-4 of their mean).
UNSEEN = 1e-8

# With few samples n for d channels a regression fits their noise. Pseudo-samples worth this times (d / n)^2 of the
# mean variance hold it near the identity: a hundredth at n = d, 1e-6 at 100 samples a channel.
FEW = 0.01

# Rows a product handles at once. On a CPU a chunk of y, z and their difference should stay in the last-level
# cache; a GPU wants few, large launches.
CPU_ROWS = 1024
CUDA_ROWS = 1 << 17

# Chunks summed in the dtype of the samples before they join a float64 sum.
FLUSH_EVERY = 8


def chunks(samples: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover ``range(samples)``, sized for the device."""
    rows = CPU_ROWS if device.type == "cpu" else CUDA_ROWS
    for start in range(0, samples, rows):
        yield slice(start, min(start + rows, samples))


class Products:
    """A sum of products a^T b of chunks of rows, float64.

    ``quick``: float32 chunks on a CPU are multiplied in float32, at twice the speed, and a few of them summed, before
    they join the float64 sum. What that rounds is less than the rounding of the samples (``Moments.noise``).
    """

    def __init__(self, height: int, width: int, like: Tensor, *, quick: bool):
        self.dtype = (
            torch.float32 if quick and like.device.type == "cpu" and like.dtype == torch.float32 else torch.float64
        )
        self._sum = torch.zeros(height, width, dtype=torch.float64, device=like.device)
        self._recent = self._sum if self.dtype == torch.float64 else self._sum.to(self.dtype)
        self._chunks = 0

    def add(self, a: Tensor, b: Tensor) -> None:
        """Both in ``dtype``."""
        self._recent.addmm_(a.T, b)
        self._chunks += 1
        if self._chunks % FLUSH_EVERY == 0:
            self._flush()

    def _flush(self) -> None:
        if self._recent is not self._sum:
            self._sum += self._recent
            self._recent.zero_()

    def total(self) -> Tensor:
        self._flush()
        return self._sum


@dataclass(frozen=True)
class Moments:
    """Count, mean (d) and scatter sum (y - mean)(y - mean)^T (d x d) of samples, float64."""

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, y: Tensor, *, quick: bool = False) -> Moments:
        """Moments of ``y`` (n x d). Cost n d^2 multiply-adds in float64, in two passes.

        Centring comes first: subtracting n mean mean^T afterwards would cancel the digits the small
        eigenvalues live in. ``quick``: see ``Products``.
        """
        count, width = y.shape
        total = torch.zeros(width, dtype=torch.float64, device=y.device)
        for rows in chunks(count, y.device):
            total += y[rows].sum(0, dtype=torch.float64)
        mean = total / max(count, 1)
        scatter = Products(width, width, y, quick=quick)
        for rows in chunks(count, y.device):
            centred = y[rows].to(scatter.dtype) - mean.to(scatter.dtype)
            scatter.add(centred, centred)
        return cls(count, mean, scatter.total())

    def joined(self, other: Moments) -> Moments:
        """Of the samples of both."""
        count = self.count + other.count
        share = other.count / max(count, 1)
        apart = other.mean - self.mean
        between = torch.outer(apart, apart) * (self.count * share)
        return Moments(count, self.mean + share * apart, self.scatter + other.scatter + between)

    @property
    def least_share(self) -> float:
        """The least share of pseudo-samples, of the mean variance."""
        return UNSEEN + FEW * (len(self.mean) / max(self.count, 1)) ** 2

    def regular(self, prior: Tensor, share: float = 0.0) -> Tensor:
        """Scatter with pseudo-samples whose response equals their target: ``share`` of the mean variance, or
        ``least_share`` if that is more.

        ``prior`` (d x d) is their scatter, up to scale (``ResponseSpace``); the identity if all filters are zero.
        """
        variance = float(self.scatter.diagonal().mean())
        weight = variance * max(share, self.least_share) if variance > 0 else 1.0
        return self.scatter + weight * unit(prior)

    def noise(self, dtype: torch.dtype) -> float:
        """Scatter that rounding in ``dtype`` alone can produce: smaller eigenvalues carry no information."""
        eps = torch.finfo(dtype).eps
        largest = float(self.scatter.diagonal().max()) if len(self.mean) else 0.0
        return max(10 * eps * largest, 100 * self.count * (eps * float(self.mean.abs().max())) ** 2)


@dataclass(frozen=True)
class Sums:
    """Of samples of a regression of z on the coordinates x of y: the moments of x, sum (z - y)(x - centre)^T (d x m),
    sum (z - y) and sum y (d). Float64. ``centre``: what was subtracted, the mean of these x or of others."""

    moments: Moments
    centre: Tensor
    by_x: Tensor
    difference: Tensor
    y: Tensor

    @classmethod
    def of(cls, z: Tensor, y: Tensor, x: Tensor, part: slice = slice(None), *, quick: bool = False) -> Sums:
        """Of a ``part`` of the rows, around their own mean. Cost n m (m + d) multiply-adds in float64, n m^2 where z is
        y. ``quick``: see ``Products``."""
        symmetric = z is y
        z, y, x = z[part], y[part], x[part]
        moments = Moments.of(x, quick=quick)
        by_x = Products(y.shape[1], len(moments.mean), y, quick=quick)
        difference = torch.zeros(y.shape[1], dtype=torch.float64, device=y.device)
        if not symmetric:
            for rows in chunks(len(y), y.device):
                apart = z[rows].to(by_x.dtype) - y[rows]
                difference += apart.sum(0)
                by_x.add(apart, x[rows].to(by_x.dtype) - moments.mean.to(by_x.dtype))
        return cls(moments, moments.mean, by_x.total(), difference, y.sum(0, dtype=torch.float64))

    def centred(self, centre: Tensor) -> Sums:
        """The same around ``centre``."""
        by_x = self.by_x + torch.outer(self.difference, self.centre - centre)
        return Sums(self.moments, centre, by_x, self.difference, self.y)

    def joined(self, other: Sums) -> Sums:
        """Of the samples of both, around the mean of both."""
        moments = self.moments.joined(other.moments)
        one, two = self.centred(moments.mean), other.centred(moments.mean)
        return Sums(moments, moments.mean, one.by_x + two.by_x, one.difference + two.difference, one.y + two.y)

    @property
    def z_mean(self) -> Tensor:
        mean: Tensor = (self.y + self.difference) / max(self.moments.count, 1)
        return mean


def unit(prior: Tensor) -> Tensor:
    """Scaled to a mean variance of 1; the identity where it has none. Float64."""
    size = float(prior.diagonal().mean())
    if not size > 0:
        return torch.eye(len(prior), dtype=torch.float64, device=prior.device)
    return prior.to(torch.float64) / size


def roots(matrix: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """``matrix^(1/2)`` and ``matrix^(-1/2)`` of a symmetric float64 matrix, eigenvalues under ``floor`` left out of
    the inverse. Cost O(d^3)."""
    values, vectors = torch.linalg.eigh(matrix)
    # eigh's own rounding can leave values at or under zero.
    floor = max(floor, float(values[-1]) * torch.finfo(matrix.dtype).eps * len(values))
    kept = values > floor
    root = values.clamp_min(0.0).sqrt()
    inverse = torch.where(kept, root.clamp_min(floor**0.5).reciprocal(), torch.zeros_like(root))
    return (vectors * root) @ vectors.T, (vectors * inverse) @ vectors.T
