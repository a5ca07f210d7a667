"""From the responses of one site to the weights that replace its layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Literal

import torch
from torch import Tensor

from leanconv.calibrate.probes import Probe, Responses
from leanconv.network.layers.modules import Factors
from leanconv.network.sites import Site
from leanconv.ranks.candidates import Choice
from leanconv.solve import (
    Activation,
    Enough,
    Gap,
    LowRank,
    Parts,
    Regression,
    ResponseSpace,
    SpatialFactors,
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


def fit_site(
    probe: Probe,
    choice: Choice,
    split: SpatialFactors | None,
    *,
    target: Responses,
    given: Responses,
    solver: Literal["linear", "nonlinear"],
    parts: Parts | None = None,
) -> Fit:
    """``target``: responses of the original. ``given``: those of ``probe``, to fit them from, at the same positions;
    the same object in the symmetric case. ``split``: the spatial factors the probe's filters are the product of, for
    a choice that has them. ``parts``: samples to fit to and to judge the fit by, for one that does best on images it
    has not seen; None for the paper's, which does best on its samples. The groups of a grouped convolution are layers
    of their own side by side, of one rank."""
    if probe.halfway:
        return _fit_halfway(probe, choice, target=target, given=given, solver=solver, parts=parts)
    site, groups = probe.site, probe.site.geometry.groups
    rank = _rank(site, choice)
    # What Q^T goes into: the layer's filters, or the horizontal half of their split.
    filters = probe.weight if split is None else split.horizontal
    q_filters, p, bias, maps, gaps = [], [], [], [], []
    for number in range(groups):
        wanted = target.part(number, groups)
        seen = wanted if given is target else given.part(number, groups)
        r = site_activation(site, wanted.y, number, groups) if _through(site, solver) else None
        low_rank, gap = _solve(wanted, seen, rank, r, probe.spaces[number], parts)
        gaps.append(gap)
        q_filters.append(_project(low_rank.q, filters.chunk(groups)[number]))
        p.append(low_rank.p)
        bias.append(low_rank.b + low_rank.p @ (low_rank.q.T @ probe.bias.chunk(groups)[number]))
        maps.append(low_rank)
    weights = [torch.cat(q_filters), torch.cat(p)]
    if choice.scheme == "spatial":
        weights = [(weights[1] @ weights[0].flatten(1)).reshape_as(filters)]
    if split is not None:
        weights.insert(0, split.vertical)

    def fitted(y: Tensor) -> Tensor:
        return torch.cat([one(part) for one, part in zip(maps, y.chunk(groups, 1), strict=True)], 1)

    error = measure(site, target, given, fitted)
    return Fit(Factors(tuple(weights), torch.cat(bias)), _judged(Outcome(error, len(target.y)), gaps))


def _fit_halfway(
    probe: Probe,
    choice: Choice,
    *,
    target: Responses,
    given: Responses,
    solver: Literal["linear", "nonlinear"],
    parts: Parts | None,
) -> Fit:
    """The horizontal filters regressed on what they see, in place of mixtures Q^T H of the old ones: with ``given`` x
    (n x (d'' kw)), r(t) by r(s^ + P Q^T x + b), and Q is the new filters."""
    site, split = probe.site, probe.split
    assert split is not None
    seen, space = _behind(probe, split, given)
    rank = _rank(site, choice)
    r = site_activation(site, target.y) if _through(site, solver) else None
    low_rank, gap = _solve(target, seen, rank, r, space, parts)
    horizontal = low_rank.q.T.reshape(rank, *split.horizontal.shape[1:])
    weights: tuple[Tensor, ...] = (split.vertical, horizontal, low_rank.p)
    if choice.scheme == "spatial":
        weights = (split.vertical, (low_rank.p @ low_rank.q.T).reshape_as(split.horizontal))
    error = measure(site, target, given, low_rank)
    return Fit(Factors(weights, low_rank.b), _judged(Outcome(error, len(target.y)), [gap]))


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
    given: Responses,
    solver: Literal["linear", "nonlinear"],
    parts: Parts,
) -> Enough | None:
    """How many of the samples ``fit_site`` needs: those its linear fit needs, which has the unknowns of the nonlinear
    one. That learns from active responses alone, so it needs as many of these. None where there are too few to tell.

    Groups are looked at together: they are fitted to the same samples, and may need more or fewer.
    """
    site, groups, regressions = probe.site, probe.site.geometry.groups, []
    if probe.halfway:  # the unknowns are filters of what they see, n x (d'' kw)
        assert probe.split is not None
        seen, space = _behind(probe, probe.split, given)
        regressions.append(Regression(_wanted(target, seen), seen.y, space))
    else:
        for number in range(groups):
            wanted = target.part(number, groups)
            seen = wanted if given is target else given.part(number, groups)
            # In the symmetric case that is PCA, also with a shortcut: the same is added to both.
            z = seen.y if seen is wanted else _wanted(wanted, seen)
            regressions.append(Regression(z, seen.y, probe.spaces[number]))
    found = enough(regressions, _rank(site, choice), parts)
    if found is None or not _through(site, solver):
        return found
    some = target.at(thinned(len(target.y), len(target.y) // 16).to(target.y.device))
    active = (site_activation(site, some.y)(_whole(some)) != 0).float().mean()
    return found.times(1 / max(float(active), 1e-3), len(target.y))


def _behind(probe: Probe, split: SpatialFactors, given: Responses) -> tuple[Responses, ResponseSpace]:
    """The responses to what was collected halfway, and the space that makes of a fit to them one to that."""
    seen = Responses(probe.responses(given.y), given.addend)
    return seen, ResponseSpace.behind(given.y, split.horizontal, split.vertical)


def _rank(site: Site, choice: Choice) -> int:
    """With d' left out (a layer the 3d scheme splits one way only) M has full rank and costs nothing: it goes into the
    horizontal filters."""
    return site.geometry.channel_limit if choice.scheme == "spatial" else choice.ranks[-1]


def _through(site: Site, solver: Literal["linear", "nonlinear"]) -> bool:
    return solver == "nonlinear" and site.activation.name != "identity"


def channel_spectrum(probe: Probe, responses: Responses) -> Tensor:
    """Eigenvalues of the responses (float64, falling), as many as there can be ranks. The groups of a grouped
    convolution have one rank, so their r-th values go together."""
    groups = probe.site.geometry.groups
    parts = zip(responses.y.chunk(groups, 1), probe.spaces, strict=True)
    values = torch.stack([spectrum(y, space=space) for y, space in parts])
    return values.sum(0)[: probe.site.geometry.channel_limit]


def split_factors(probe: Probe) -> Factors:
    """A probe whose filters are the product of a spatial split, as it is."""
    assert probe.split is not None
    return Factors((probe.split.vertical, probe.split.horizontal), probe.bias)


def _solve(
    target: Responses,
    given: Responses,
    rank: int,
    r: Activation | None,
    space: ResponseSpace,
    parts: Parts | None,
) -> tuple[LowRank, Gap | None]:
    """Through ``r``, or linearly, and what samples held out say about their number. Responses with the shortcut added
    are fitted: r(s + y) by r(s^ + M y^ + b), s and s^ zero without one."""
    if r is None and given is target:
        return pca(given.y, rank, space=space), None
    if parts is not None:
        fitted = unseen(
            _whole(target),
            given.y,
            rank,
            r,
            parts=parts,
            symmetric=given is target,
            addend=given.addend,
            space=space,
        )
        return fitted.map, fitted.gap
    if r is not None:
        return nonlinear(_whole(target), given.y, rank, r, addend=given.addend, space=space).map, None
    return reduced_rank(_wanted(target, given), given.y, rank, space=space), None


def _wanted(target: Responses, given: Responses) -> Tensor:
    """What a linear fit is to give, so that with the shortcut added it gives the target."""
    return target.y if given.addend is None else _whole(target) - given.addend


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


def measure(site: Site, target: Responses, given: Responses, fitted: Callable[[Tensor], Tensor] = lambda y: y) -> float:
    """Relative error behind the activation, shortcut included, of what ``fitted`` makes of the ``given`` responses. A
    few rows at a time: all of them would take memory for every step, which a CPU waits for longer than for the sums."""
    r = site_activation(site, target.y)
    size, error = (torch.zeros((), dtype=torch.float64, device=target.y.device) for _ in range(2))
    for rows in chunks(len(target.y), target.y.device):
        wanted = r(_whole(target.at(rows)))
        seen = given.at(rows)
        found = r(_whole(Responses(fitted(seen.y), seen.addend)))
        size += torch.linalg.vector_norm(wanted, dtype=torch.float64).square()
        error += torch.linalg.vector_norm(found - wanted, dtype=torch.float64).square()
    total, apart = size.sqrt().item(), error.sqrt().item()
    if total == 0:
        return 0.0 if apart == 0 else math.inf
    return apart / total
