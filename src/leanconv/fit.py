"""From the responses of one site to the weights that replace its layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leanconv.calibrate.responses import Probe, Responses
from leanconv.network.replace import Factors
from leanconv.network.sites import Site
from leanconv.ranks.candidates import Choice
from leanconv.solve import (
    Activation,
    LowRank,
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
    probe: Probe,
    choice: Choice,
    split: SpatialFactors | None,
    *,
    target: Responses,
    given: Responses,
    solver: Literal["linear", "nonlinear"],
) -> Fit:
    """``target``: responses of the original. ``given``: those of ``probe``, to fit them from, at the same positions;
    the same object in the symmetric case. ``split``: the spatial factors the probe's filters are the product of, for
    a choice that has them."""
    site = probe.site
    if choice.scheme == "spatial":
        return Fit(split_factors(probe, split), measure(site, target, given))
    # Responses to white noise have covariance W W^T: where the images show nothing, that is where responses can be.
    rows = probe.weight.flatten(1).to(torch.float64)
    low_rank = _solve(site, target, given, choice.ranks[-1], solver, rows @ rows.T)
    bias = low_rank.b + low_rank.p @ (low_rank.q.T @ probe.bias)
    if split is None:
        weights = [_project(low_rank.q, probe.weight), low_rank.p]
    else:
        weights = [split.vertical, _project(low_rank.q, split.horizontal), low_rank.p]
    fitted = Responses(low_rank(given.y), given.addend)
    return Fit(Factors(tuple(weights), bias), measure(site, target, fitted))


def split_factors(probe: Probe, split: SpatialFactors | None) -> Factors:
    """The weight-only spatial split: nothing to fit."""
    assert split is not None
    return Factors((split.vertical, split.horizontal), probe.bias)


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
