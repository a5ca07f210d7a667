"""Second moments of samples, in float64, made invertible without changing the answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Pseudo-samples are this share of the mean response variance. Dead or duplicate filters, or fewer samples than
# channels, leave directions nobody has seen; a share this small changes nothing in directions that were seen
# (real spectra end around 1e-4 of their mean) and keeps the identity in those that were not.
UNSEEN = 1e-8

# Rows a product handles at once. On a CPU a chunk of y, z and their difference should stay in the last-level
# cache; a GPU wants few, large launches.
CPU_ROWS = 1024
CUDA_ROWS = 1 << 17


def chunks(samples: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover ``range(samples)``, sized for the device."""
    rows = CPU_ROWS if device.type == "cpu" else CUDA_ROWS
    for start in range(0, samples, rows):
        yield slice(start, min(start + rows, samples))


@dataclass(frozen=True)
class Moments:
    """Count, mean (d) and scatter sum (y - mean)(y - mean)^T (d x d) of samples, float64."""

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, y: Tensor) -> Moments:
        """Moments of ``y`` (n x d). Cost n d^2 multiply-adds in float64, in two passes.

        Centring comes first: subtracting n mean mean^T afterwards would cancel the digits the small
        eigenvalues live in.
        """
        count, width = y.shape
        total = torch.zeros(width, dtype=torch.float64, device=y.device)
        for rows in chunks(count, y.device):
            total += y[rows].sum(0, dtype=torch.float64)
        mean = total / max(count, 1)
        scatter = torch.zeros(width, width, dtype=torch.float64, device=y.device)
        for rows in chunks(count, y.device):
            centred = y[rows].to(torch.float64) - mean
            scatter.addmm_(centred.T, centred)
        return cls(count, mean, scatter)

    def ridge(self) -> float:
        """The weight of the pseudo-samples, one along each axis, response equal to target."""
        mean_variance = float(self.scatter.diagonal().mean())
        return UNSEEN * mean_variance if mean_variance > 0 else 1.0

    def regular(self) -> Tensor:
        """Scatter including the pseudo-samples: positive definite whatever the data."""
        return self.scatter + self.ridge() * torch.eye(len(self.mean), dtype=torch.float64, device=self.mean.device)


def roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """``matrix^(1/2)`` and ``matrix^(-1/2)`` of a symmetric positive definite float64 matrix. Cost O(d^3)."""
    values, vectors = torch.linalg.eigh(matrix)
    # eigh's own rounding can leave values at or under zero; the floor is its error bound.
    floor = values[-1] * torch.finfo(matrix.dtype).eps * len(values)
    root = values.clamp_min(floor).sqrt()
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
