"""How far to trust the samples: the share of pseudo-samples, chosen by a linear fit's error on unseen images."""

from __future__ import annotations

import torch
from torch import Tensor

from leanconv.solve.moments import Sums, unit

# Shares of the mean variance that are tried.
SHARES = tuple(10.0 ** (half / 2) for half in range(-10, 3))

# The prior may be singular: this share of white noise is added to it.
ANYWHERE = 1e-6


def strength(fitted: Sums, held: Sums, prior: Tensor) -> float:
    """The share of pseudo-samples, of scatter ``prior`` up to scale, with which the regression on samples ``fitted`` is
    closest to z of the samples ``held`` out. One of ``SHARES``, or 0 for ``least_share``.

    With S the scatter of x and R that of the pseudo-samples, whose response is their target, the fit at share mu is
    y + mean(z - y) + K (x - mean), K = D (S + mu R)^-1, D = sum (z - y)(x - mean)^T. In coordinates W in which R is
    the identity and S = diag(s), K W^-T = (D W) / (s + mu): all shares come from one decomposition, and the error on
    the rows held out is, up to a constant, the quadratic form w^T Q w - 2 a^T w in w = 1 / (s + mu) with
    Q = ((D W)^T D W) * (W^T S_held W) and a = diag((D W)^T D_held W).

    Cost: O(m^2 (m + d)).
    """
    moments = fitted.moments
    variance = float(moments.scatter.diagonal().mean())
    if not variance > 0:
        return 0.0
    away = held.moments.mean - moments.mean
    scatter = held.moments.scatter + held.moments.count * torch.outer(away, away)
    offset = fitted.difference / moments.count
    by_x = fitted.by_x
    held_by_x = held.centred(moments.mean).by_x - torch.outer(offset, held.moments.count * away)

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
