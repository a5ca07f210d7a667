"""From the responses of one site to the weights that replace its layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leanconv.calibrate.responses import Responses
from leanconv.network.replace import Factors
from leanconv.network.sites import Site
from leanconv.ranks.candidates import Choice
from leanconv.solve import (
    Activation,
    LowRank,
    SpatialBasis,
    SpatialFactors,
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
    target: Responses,
    given: Responses,
    filters: tuple[Tensor, Tensor],
    basis: SpatialBasis | None,
    solver: Literal["linear", "nonlinear"],
) -> Fit:
    """``target``: responses of the original. ``given``: those to fit them from, at the same positions; the same
    object in the symmetric case. ``filters``: weight (d x c x kernel) and bias (d), batch norm folded."""
    weight, bias = filters
    if choice.scheme == "spatial":
        split = _split(basis, choice)
        return Fit(Factors((split.vertical, split.horizontal), bias), measure(site, target, given))
    effective = weight if choice.scheme == "channel" else _split(basis, choice).product()
    # Responses to white noise have covariance W W^T: where the images show nothing, that is where responses can be.
    rows = effective.flatten(1).to(torch.float64)
    low_rank = _solve(site, target, given, choice.ranks[-1], solver, rows @ rows.T)
    expanded_bias = low_rank.b + low_rank.p @ (low_rank.q.T @ bias)
    if choice.scheme == "channel":
        weights = [_project(low_rank.q, weight), low_rank.p]
    else:
        split = _split(basis, choice)
        weights = [split.vertical, _project(low_rank.q, split.horizontal), low_rank.p]
    fitted = Responses(low_rank(given.y), given.addend)
    return Fit(Factors(tuple(weights), expanded_bias), measure(site, target, fitted))


def _split(basis: SpatialBasis | None, choice: Choice) -> SpatialFactors:
    assert basis is not None
    return basis.split(choice.ranks[0])


def _solve(site: Site, target: Responses, given: Responses, rank: int, solver: str, prior: Tensor) -> LowRank:
    """Responses with the shortcut added are fitted: r(s + y) by r(s^ + M y^ + b), s and s^ zero without one."""
    if solver == "nonlinear" and site.activation.name != "identity":
        whole = _whole(target)
        return nonlinear(whole, given.y, rank, site_activation(site, whole), addend=given.addend, prior=prior).map
    if given is target:
        return pca(given.y, rank, prior=prior)
    wanted = target.y if given.addend is None else _whole(target) - given.addend
    return reduced_rank(wanted, given.y, rank, prior=prior)


def _whole(responses: Responses) -> Tensor:
    """What reaches the activation."""
    return responses.y if responses.addend is None else responses.y + responses.addend


def _project(q: Tensor, weight: Tensor) -> Tensor:
    """Q^T W: d' filters from d. weight d x ... -> d' x ..."""
    return (q.T @ weight.flatten(1)).reshape(q.shape[1], *weight.shape[1:])


def site_activation(site: Site, like: Tensor) -> Activation:
    parameters = {
        key: value.to(like) if isinstance(value, Tensor) else value for key, value in site.activation.parameters.items()
    }
    return activation(site.activation.name, **parameters)


def measure(site: Site, target: Responses, approximation: Responses) -> float:
    """Relative error behind the activation, shortcut included."""
    wanted = _whole(target)
    r = site_activation(site, wanted)
    wanted = r(wanted)
    size = float(torch.linalg.vector_norm(wanted, dtype=torch.float64))
    error = float(torch.linalg.vector_norm(r(_whole(approximation)) - wanted, dtype=torch.float64))
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return error / size
