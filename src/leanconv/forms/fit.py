"""From the responses of one site to the weights that replace its layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Literal

import torch
from torch import Tensor

from leanconv.calibrate.probes import Probe, Responses
from leanconv.forms.base import RESPONSES, Choice
from leanconv.network.layers.modules import Factors
from leanconv.network.sites import Site
from leanconv.solve import (
    Activation,
    Enough,
    Gap,
    LowRank,
    Metric,
    Parts,
    Regression,
    ResponseSpace,
    TwoStep,
    activation,
    enough,
    nonlinear,
    pca,
    reduced_rank,
    spectrum,
    thinned,
    unseen,
)
from leanconv.solve.moments import chunks


@dataclass(frozen=True)
class Outcome:
    """How well a site does: its relative response error ||r(y) - r(y~)|| / ||r(y)|| on the samples.

    ``samples``: how many these are, 0 where nothing was fitted. ``enough``: whether twice as many would hardly help,
    ``needed``: about how many would be enough; None where that was not looked at.
    """

    error: float
    samples: int = 0
    enough: bool | None = None
    needed: int | None = None


@dataclass(frozen=True)
class Fit:
    """The factors of one site, and how well they do."""

    factors: Factors
    outcome: Outcome


def fit_layer(
    probe: Probe,
    choice: Choice,
    *,
    target: Responses,
    inputs: Responses,
    solver: Literal["linear", "nonlinear"],
    holdout: Parts | None = None,
    metric: Sequence[Metric | None] = (),
) -> Fit:
    """``target``: responses of the original. ``inputs``: what ``probe`` gives at the same positions, to fit them from;
    the same object in the symmetric case. ``holdout``: samples to fit to and to judge the fit by, for one that does
    best on images it has not seen; None for the paper's, which does best on its samples. The groups of a grouped
    convolution are layers of their own side by side, of one rank; ``metric`` has one for each.

    Where the filters are split, Q^T goes into the second half. Where that half is free it is regressed on what it sees,
    in place of mixtures Q^T H of the old filters: with ``inputs`` x (n x (r k)), r(t) by r(s^ + P Q^T x + b).
    """
    site, split, groups = probe.site, probe.split, probe.site.geometry.groups
    rank = _response_rank(site, choice)
    filters = probe.weight if split is None else split.second
    q_filters, p, bias, maps, gaps = [], [], [], [], []
    for number in range(groups):
        wanted, seen, space = _group(probe, target, inputs, number)
        r = site_activation(site, wanted.y, number, groups) if _through(site, solver) else None
        low_rank, gap = _solve(wanted, seen, rank, r, space, holdout, metric[number] if metric else None)
        gaps.append(gap)
        p.append(low_rank.p)
        maps.append(low_rank)
        if probe.halfway:
            q_filters.append(low_rank.q.T.reshape(rank, *filters.shape[1:]))
            bias.append(low_rank.b)
        else:
            q_filters.append(_project(low_rank.q, filters.chunk(groups)[number]))
            bias.append(low_rank.b + low_rank.p @ (low_rank.q.T @ probe.bias.chunk(groups)[number]))
    weights = [torch.cat(q_filters), torch.cat(p)]
    if not choice.form.pointwise_end:
        weights = [(weights[1] @ weights[0].flatten(1)).reshape_as(filters)]
    if split is not None:
        weights.insert(0, split.first)

    def fitted(y: Tensor) -> Tensor:
        if groups == 1:
            return maps[0](y)
        return torch.cat([each(part) for each, part in zip(maps, y.chunk(groups, 1), strict=True)], 1)

    error = measure(site, target, inputs, fitted)
    return Fit(Factors(tuple(weights), torch.cat(bias)), _judged(Outcome(error, len(target.y)), gaps))


def _group(
    probe: Probe, target: Responses, inputs: Responses, number: int
) -> tuple[Responses, Responses, ResponseSpace]:
    """Of one group: what its responses are to be, those it is fitted from, and the space these lie in. A free second
    half is fitted from what it sees, and its space makes of a fit to its responses one to that."""
    if probe.halfway:
        assert probe.split is not None
        seen = Responses(probe.responses(inputs.y), inputs.addend)
        return target, seen, ResponseSpace.behind(inputs.y, probe.split.second, probe.split.first)
    groups = probe.site.geometry.groups
    wanted = target.part(number, groups)
    return wanted, wanted if inputs is target else inputs.part(number, groups), probe.spaces[number]


def _judged(outcome: Outcome, gaps: list[Gap | None]) -> Outcome:
    """With what the ``gaps`` of a site's groups say together about the number of samples."""
    known = [gap for gap in gaps if gap is not None]
    if not known:
        return outcome
    whole = reduce(add, known)
    return replace(outcome, enough=whole.enough, needed=whole.needed)


def samples_needed(
    probe: Probe,
    choice: Choice,
    *,
    target: Responses,
    inputs: Responses,
    solver: Literal["linear", "nonlinear"],
    holdout: Parts,
) -> Enough | None:
    """How many of the samples ``fit_layer`` needs: those its linear fit needs, which has the unknowns of the nonlinear
    one. That learns from active responses alone, so it needs as many of these. None where there are too few to tell.

    Groups are looked at together: they are fitted to the same samples, and may need more or fewer.
    """
    site, regressions = probe.site, []
    for number in range(site.geometry.groups):
        wanted, seen, space = _group(probe, target, inputs, number)
        # In the symmetric case that is PCA, also with a shortcut: the same is added to both.
        z = seen.y if seen is wanted else _wanted(wanted, seen)
        regressions.append(Regression(z, seen.y, space))
    found = enough(regressions, _response_rank(site, choice), holdout)
    if found is None or not _through(site, solver):
        return found
    some = target.at(thinned(len(target.y), len(target.y) // 16).to(target.y.device))
    active = (site_activation(site, some.y)(_whole(some)) != 0).float().mean()
    return found.times(1 / max(float(active), 1e-3), len(target.y))


def _response_rank(site: Site, choice: Choice) -> int:
    """Of the map from responses to responses. A form that does not cut these has one of full rank, which costs nothing:
    it goes into the second half of the split."""
    return choice.form.rank_on(RESPONSES, site.geometry, choice.ranks)


def _through(site: Site, solver: Literal["linear", "nonlinear"]) -> bool:
    return solver == "nonlinear" and site.activation.name != "identity"


def response_spectrum(probe: Probe, responses: Responses) -> Tensor:
    """Eigenvalues of the responses (float64, falling), as many as there can be ranks. The groups of a grouped
    convolution have one rank, so their r-th values go together."""
    groups = probe.site.geometry.groups
    parts = zip(responses.y.chunk(groups, 1), probe.spaces, strict=True)
    values = torch.stack([spectrum(y, space=space) for y, space in parts])
    return values.sum(0)[: probe.site.geometry.channel_limit]


def split_probe(dense: Probe, split: TwoStep, *, free: bool) -> Probe:
    """A probe of filters that are the product of a split. ``free``: its second half is to be fitted to what it sees,
    where that is more than d numbers: else mixtures of the d old filters are all the filters there are."""
    geometry = dense.site.geometry
    wide = split.second[0].numel() > geometry.out_channels and geometry.groups == 1
    return Probe(dense.site, split.product(), dense.bias, split, halfway=free and wide)


def split_factors(probe: Probe) -> Factors:
    """A probe whose filters are the product of a spatial split, as it is."""
    assert probe.split is not None
    return Factors((probe.split.first, probe.split.second), probe.bias)


def _solve(
    target: Responses,
    inputs: Responses,
    rank: int,
    r: Activation | None,
    space: ResponseSpace,
    parts: Parts | None,
    metric: Metric | None,
) -> tuple[LowRank, Gap | None]:
    """Through ``r``, or linearly, and what samples held out say about their number. Responses with the shortcut added
    are fitted: r(s + y) by r(s^ + M y^ + b), s and s^ zero without one."""
    if r is None and inputs is target:
        return pca(inputs.y, rank, space=space), None
    if parts is not None:
        fitted = unseen(
            _whole(target),
            inputs.y,
            rank,
            r,
            parts=parts,
            symmetric=inputs is target,
            addend=inputs.addend,
            space=space,
            metric=metric,
        )
        return fitted.map, fitted.gap
    if r is not None:
        return nonlinear(_whole(target), inputs.y, rank, r, addend=inputs.addend, space=space).map, None
    return reduced_rank(_wanted(target, inputs), inputs.y, rank, space=space), None


def _wanted(target: Responses, inputs: Responses) -> Tensor:
    """What a linear fit is to give, so that with the shortcut added it gives the target."""
    return target.y if inputs.addend is None else _whole(target) - inputs.addend


def _whole(responses: Responses) -> Tensor:
    """What reaches the activation."""
    return responses.y if responses.addend is None else responses.y + responses.addend


def _project(q: Tensor, weight: Tensor) -> Tensor:
    """Q^T W: d' filters from d. weight d x ... -> d' x ..."""
    return (q.T @ weight.flatten(1)).reshape(q.shape[1], *weight.shape[1:])


def site_activation(site: Site, like: Tensor, number: int = 0, groups: int = 1) -> Activation:
    """The activation behind a site, or behind group ``number`` of it; a slope a filter goes with its group."""

    def part(value: float | Tensor) -> float | Tensor:
        if not isinstance(value, Tensor):
            return value
        return (value if value.numel() == 1 else value.chunk(groups)[number]).to(like)

    return activation(site.activation.name, **{key: part(value) for key, value in site.activation.parameters.items()})


def measure(
    site: Site, target: Responses, inputs: Responses, fitted: Callable[[Tensor], Tensor] = lambda y: y
) -> float:
    """Relative error behind the activation, shortcut included, of what ``fitted`` makes of the ``inputs``. A
    few rows at a time: all of them would take memory for every step, which a CPU waits for longer than for the sums."""
    r = site_activation(site, target.y)
    size, error = (torch.zeros((), dtype=torch.float64, device=target.y.device) for _ in range(2))
    for rows in chunks(len(target.y), target.y.device):
        wanted = r(_whole(target.at(rows)))
        seen = inputs.at(rows)
        found = r(_whole(Responses(fitted(seen.y), seen.addend)))
        size += torch.linalg.vector_norm(wanted, dtype=torch.float64).square()
        error += torch.linalg.vector_norm(found - wanted, dtype=torch.float64).square()
    total, apart = size.sqrt().item(), error.sqrt().item()
    if total == 0:
        return 0.0 if apart == 0 else math.inf
    return apart / total
