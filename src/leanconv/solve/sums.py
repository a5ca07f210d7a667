"""Sums over samples that a reduced-rank regression is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leanconv.solve.moments import Moments, chunks


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
    def of(cls, z: Tensor, y: Tensor, x: Tensor) -> Sums:
        """Around their own mean. Cost n m (m + d) multiply-adds in float64, n m^2 where z is y."""
        moments = Moments.of(x)
        by_x = torch.zeros(y.shape[1], len(moments.mean), dtype=torch.float64, device=y.device)
        difference = torch.zeros(y.shape[1], dtype=torch.float64, device=y.device)
        if z is not y:
            for rows in chunks(len(y), y.device):
                apart = z[rows].to(torch.float64) - y[rows]
                difference += apart.sum(0)
                by_x.addmm_(apart.T, x[rows].to(torch.float64) - moments.mean)
        return cls(moments, moments.mean, by_x, difference, y.sum(0, dtype=torch.float64))

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
