"""From the responses of one site to the weights that replace its layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leanconv.network.replace import Factors
from leanconv.network.sites import Site
from leanconv.ranks.candidates import Choice
from leanconv.solve import (
    Activation,
    LowRank,
    SpatialBasis,
    activation,
    nonlinear,
    pca,
    reduced_rank,
)


@dataclass(frozen=True)
class Fit:
    """The factors of one site and their relative response error ||r(y) - r(y~)|| / ||r(y)|| on the samples."""

    factors: Factors
    error: float


def fit_site(
    site: Site,
    choice: Choice,
    *,
    target: Tensor,
    y: Tensor,
    filters: tuple[Tensor, Tensor],
    basis: SpatialBasis | None,
    solver: Literal["linear", "nonlinear"],
) -> Fit:
    """``target``: responses of the original (n x d). ``y``: responses to fit them from, at the same positions;
    the same tensor in the symmetric case. ``filters``: weight (d x c x kh x kw) and bias (d), batch norm folded."""
    weight, bias = filters
    if choice.scheme == "spatial":
        assert basis is not None
        split = basis.split(choice.ranks[0])
        return Fit(Factors((split.vertical, split.horizontal), bias), measure(site, target, y))
    low_rank = _solve(site, target, y, choice.ranks[-1], solver)
    expanded_bias = low_rank.b + low_rank.p @ (low_rank.q.T @ bias)
    if choice.scheme == "channel":
        weights = [_project(low_rank.q, weight), low_rank.p]
    else:
        assert basis is not None
        split = basis.split(choice.ranks[0])
        weights = [split.vertical, _project(low_rank.q, split.horizontal), low_rank.p]
    return Fit(Factors(tuple(weights), expanded_bias), measure(site, target, low_rank(y)))


def _solve(site: Site, target: Tensor, y: Tensor, rank: int, solver: str) -> LowRank:
    if solver == "nonlinear" and site.activation.name != "identity":
        return nonlinear(target, y, rank, site_activation(site, target)).map
    return pca(y, rank) if y is target else reduced_rank(target, y, rank)


def _project(q: Tensor, weight: Tensor) -> Tensor:
    """Q^T W: d' filters from d. weight d x ... -> d' x ..."""
    return (q.T @ weight.flatten(1)).reshape(q.shape[1], *weight.shape[1:])


def site_activation(site: Site, like: Tensor) -> Activation:
    parameters = {
        key: value.to(like) if isinstance(value, Tensor) else value for key, value in site.activation.parameters.items()
    }
    return activation(site.activation.name, **parameters)


def measure(site: Site, target: Tensor, approximation: Tensor) -> float:
    """Relative error behind the activation."""
    r = site_activation(site, target)
    wanted = r(target)
    size = float(torch.linalg.vector_norm(wanted, dtype=torch.float64))
    error = float(torch.linalg.vector_norm(r(approximation) - wanted, dtype=torch.float64))
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return error / size
