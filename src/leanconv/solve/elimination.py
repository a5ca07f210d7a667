"""Which input channels a linear layer misses least, and its weights without them: least squares by second moments.

A sample is the inputs of a position and then its responses, in one row; ``taps`` inputs make a channel.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from leanconv.solve.moments import Moments

# Share of a layer's channels that go between two updates of the whole inverse.
STEP = 0.02
# Ridges that a refit is tried with, in units of the mean square of an input.
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


def solve(a: Tensor, b: Tensor) -> Tensor:
    """a^-1 b. A GPU is not waited for to hear whether it went well."""
    found: Tensor = torch.linalg.solve_ex(a, b)[0]
    return found


def growths(inverse: Tensor, rows: Tensor, taps: int) -> Tensor:
    """What the least squares' residual grows by when a channel goes, for every channel alone: b^T (G^-1)^-1 b, with b
    the channel's rows of the solution and G^-1 its block of the inverse."""
    n = len(rows) // taps
    blocks = inverse.reshape(n, taps, n, taps).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    b = rows.reshape(n, taps, -1)
    return (b * solve(blocks, b)).sum((1, 2))


def numbers(channels: Tensor, taps: int) -> Tensor:
    """Places of all inputs of some channels, each of which has ``taps``."""
    return (channels[:, None] * taps + torch.arange(taps, device=channels.device)).flatten()


def elimination(
    gram: Tensor, cross: Tensor, taps: int, keep: int, most: float = math.inf
) -> tuple[list[int], list[float]]:
    """Channels in the order they go, until ``keep`` are left or the residual has grown by ``most``, and its growth with
    each.

    ``gram`` (c taps) x (c taps), ``cross`` (c taps) x d: second moments of inputs, and of inputs and responses.
    Backward: each time the channel goes that least squares misses least. It is looked for among the few that were best
    at the last update of the inverse, which is one Schur complement for all of those that go.
    """
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    rows = inverse @ cross
    channels = len(gram) // taps
    alive, step = torch.arange(channels, device=gram.device), max(1, round(STEP * channels))
    order: list[int] = []
    growth: list[float] = []
    while len(alive) > keep and sum(growth) < most:
        count = min(step, len(alive) - keep)
        pool = growths(inverse, rows, taps).argsort()[: 2 * count]
        picked, cost = _picked(inverse, rows, pool, taps, count)
        left = torch.ones(len(alive), dtype=torch.bool, device=gram.device)
        left[picked] = False
        rest = left.nonzero()[:, 0]
        order += alive[picked].tolist()
        growth += cost.tolist()
        gone, stay = numbers(picked, taps), numbers(rest, taps)
        across = inverse[stay][:, gone]
        share = solve(inverse[gone][:, gone], torch.cat([across.T, rows[gone]], 1))
        inverse = torch.addmm(inverse[stay][:, stay], across, share[:, : len(stay)], alpha=-1)
        rows = torch.addmm(rows[stay], across, share[:, len(stay) :], alpha=-1)
        alive = alive[rest]
    return order, growth


def _picked(inverse: Tensor, rows: Tensor, pool: Tensor, taps: int, count: int) -> tuple[Tensor, Tensor]:
    """``count`` of the channels in ``pool``, one by one: of two that say the same only one goes for nothing."""
    index = numbers(pool, taps)
    inverse, rows = inverse[index][:, index], rows[index]
    gone = torch.zeros(len(pool), dtype=rows.dtype, device=rows.device)
    eye = torch.eye(taps, dtype=rows.dtype, device=rows.device)
    picked, cost = [], []
    for _ in range(count):
        all_costs = growths(inverse, rows, taps) + gone
        best = all_costs.argmin()
        at = numbers(best[None], taps)
        across = inverse[:, at]
        share = solve(across[at], torch.cat([across.T, rows[at]], 1))
        inverse, rows = inverse - across @ share[:, : len(index)], rows - across @ share[:, len(index) :]
        # What has gone has no inverse any more; this one makes its growth a number, and the next line forbids it.
        inverse[at[:, None], at] = eye
        gone[best] = torch.inf
        picked.append(best)
        cost.append(all_costs[best])
    return pool[torch.stack(picked)], torch.stack(cost)


def centred(moments: Moments, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean second moments of inputs, the first ``width`` numbers of a sample (m x m), of inputs and responses (m x d),
    and of responses (their sum), around their means."""
    mean = moments.scatter / moments.count
    return mean[:width, :width].clone(), mean[:width, width:], mean.diagonal()[width:].sum()


def of_inputs(moments: Moments, index: Tensor, width: int) -> Moments:
    """Of samples with some of their inputs, and all their responses."""
    kept = torch.cat([index, torch.arange(width, len(moments.mean), device=index.device)])
    return Moments(moments.count, moments.mean[kept], moments.scatter[kept][:, kept])


def refitted(seen: Moments, unseen: Moments, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (m x d) and bias of the least squares whose ridge, around the ``weight`` it has (m x d), suits the
    samples not seen best; then from all."""
    width = len(weight)

    def fit(moments: Moments, ridge: float) -> Tensor:
        gram, cross, _ = centred(moments, width)
        strength = ridge * gram.diagonal().mean()
        gram.diagonal().add_(strength)
        return torch.cholesky_solve(cross + strength * weight, torch.linalg.cholesky(gram))

    away = unseen.mean - seen.mean
    gram, cross, _ = centred(replace(unseen, scatter=unseen.scatter + unseen.count * torch.outer(away, away)), width)
    fits = [fit(seen, ridge) for ridge in RIDGES]
    # Less what is the same for all of them.
    errors = torch.stack([(found * (gram @ found - 2 * cross)).sum() for found in fits])
    everything = seen.joined(unseen)
    found = fit(everything, RIDGES[int(errors.argmin())])
    return found, everything.mean[width:] - everything.mean[:width] @ found
