"""How far to trust the samples: pseudo-samples chosen by a linear fit's error on images it has not seen."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from leanconv.solve.moments import Moments, chunks, unit
from leanconv.solve.reduced_rank import differences

# Shares of the mean variance that are tried.
SHARES = tuple(10.0 ** (half / 2) for half in range(-10, 3))

# So much more than the prior says is possible everywhere: it may be singular.
ANYWHERE = 1e-6


class Rows(NamedTuple):
    """Samples of a regression of ``z`` (n x d), the sum of ``y`` and a map of ``x`` (n x m)."""

    z: Tensor
    y: Tensor
    x: Tensor


def strength(fitted: Rows, held: Rows, moments: Moments, prior: Tensor) -> float:
    """The share of pseudo-samples, of scatter ``prior`` up to scale, with which the regression on ``fitted`` is closest
    to the z of ``held``. One of ``SHARES``, or 0: as few as there are in any case. ``moments``: of the x fitted to.

    With S the scatter of x and R that of the pseudo-samples, whose response is their target, the fit at share mu is
    y + mean(z - y) + K (x - mean), K = D (S + mu R)^-1, D = sum (z - y)(x - mean)^T. In coordinates W in which R is
    the identity and S = diag(s), K W^-T = (D W) / (s + mu): all shares come from one decomposition, and the error on
    the rows held out is, up to a constant, the quadratic form w^T Q w - 2 a^T w in w = 1 / (s + mu) with
    Q = ((D W)^T D W) * (W^T S_held W) and a = diag((D W)^T D_held W).

    Cost: m d multiply-adds a row, m (m + d) a row held out, and O(m^2 (m + d)).
    """
    variance = float(moments.scatter.diagonal().mean())
    if not variance > 0:
        return 0.0
    by_x, total = differences(*fitted, moments.mean)
    held_by_x, _ = differences(*held, moments.mean)
    away = torch.zeros_like(moments.mean)
    scatter = torch.zeros_like(moments.scatter)
    for rows in chunks(len(held.x), held.x.device):
        centred = held.x[rows].to(torch.float64) - moments.mean
        away += centred.sum(0)
        scatter.addmm_(centred.T, centred)
    held_by_x -= torch.outer(total / moments.count, away)

    prior = unit(prior) + ANYWHERE * torch.eye(len(prior), dtype=torch.float64, device=prior.device)
    inverse = torch.linalg.inv(torch.linalg.cholesky(variance * prior))
    s, vectors = torch.linalg.eigh(inverse @ moments.scatter @ inverse.T)
    w = inverse.T @ vectors
    d, held_d = by_x @ w, held_by_x @ w
    quadratic = (d.T @ d) * (w.T @ scatter @ w)
    linear = (d * held_d).sum(0)
    shares = [0.0, *(share for share in SHARES if share > moments.least_share)]
    tried = torch.tensor(shares, dtype=torch.float64, device=prior.device).clamp_min(moments.least_share)
    weights = (s.clamp_min(0.0) + tried[:, None]).reciprocal()  # shares x m
    errors = ((weights @ quadratic) * weights).sum(1) - 2 * weights @ linear
    best: float = shares[int(errors.argmin())]
    return best
