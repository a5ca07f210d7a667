"""Low rank through the activation, judged by samples it was not fitted to: how far to go, how far to trust them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leanconv.solve.activations import Activation
from leanconv.solve.holdout import Parts
from leanconv.solve.metric import Metric
from leanconv.solve.moments import Sums
from leanconv.solve.nonlinear import Descent, Number, squared_error
from leanconv.solve.reduced_rank import LowRank, Regressor, linear
from leanconv.solve.response_space import ResponseSpace
from leanconv.solve.ridge import strength
from leanconv.solve.sample_size import Gap

# lambda of the z-step. With noise to learn the number of iterations matters and lambda hardly does (0.3, 1 and 3 were
# tried); 0.3 takes the fewest iterations.
WEIGHT = 0.3
ITERATIONS = 50  # at most

# Three shares of pseudo-samples are tried for HEAT iterations: that of the linear fit, one WEAKER times smaller and
# none. The best goes on.
WEAKER = 30
HEAT = 4

# A trial ends when the error has fallen by less than this share in PATIENCE iterations.
TOLERANCE = 1e-3
PATIENCE = 3


@dataclass(frozen=True)
class UnseenFit:
    """``map``: fitted to all samples, with the ``iterations`` and the ``share`` of pseudo-samples that did best on the
    held-out samples. ``errors``: squared errors there of the fit to the other samples, the linear one first, then after
    each iteration (none where nothing was iterated). ``gap``: between the errors of both fits there, which says whether
    more samples would help (None without an activation)."""

    map: LowRank
    iterations: int
    share: float
    errors: tuple[float, ...]
    gap: Gap | None = None


def unseen(
    target: Tensor,
    y: Tensor,
    rank: int,
    activation: Activation | None,
    *,
    parts: Parts,
    symmetric: bool = False,
    addend: Tensor | None = None,
    space: ResponseSpace | None = None,
    metric: Metric | None = None,
) -> UnseenFit:
    """``nonlinear``, or ``reduced_rank`` where ``activation`` is None, that does not fit the noise of its samples.

    Behind a ReLU only active responses carry information: in a deep layer one of ten, from a few hundred images. A
    solver that continues until it matches the samples gets worse on other images. ``parts``: rows to fit to, and all
    other rows, of other images. The latter choose when to stop and the weight of pseudo-samples whose response is their
    target (a ridge towards the unchanged layer). With both chosen, the result is fitted to all rows. ``symmetric``: the
    target is ``y`` plus the addend; a linear fit then has nothing to correct and cannot choose a ridge. ``metric``: in
    which directions are kept.

    Cost: two ``nonlinear`` of as many iterations, up to three times ``HEAT`` more, a few O(m^3), and for the gap one
    measurement on the held-out rows.
    """
    space = space or ResponseSpace.anywhere(y)
    # Copied once into this order, both parts are slices of everything.
    order = torch.cat(parts).to(y.device)
    assert len(order) == len(y)
    few, held = slice(0, len(parts.fitted)), slice(len(parts.fitted), len(y))
    same = target is y
    y, space = y[order], space.at(order)
    target = y if same else target[order]
    addend = None if addend is None else addend[order]
    x = space.coordinates(y)

    wanted = target if addend is None else target - addend
    seen, judging = (Sums.of(wanted, y, x, part, quick=True) for part in (few, held))
    del wanted  # as large as the responses
    share = 0.0 if symmetric else strength(seen, judging, space.prior)
    everything = seen.joined(judging)

    if activation is None:
        whole = Regressor.with_moments(everything.moments, x, replace(space, share=share), metric)
        return UnseenFit(whole.on_responses(linear(everything, rank, whole, y.dtype)), 0, share, ())

    moments = seen.moments
    plain = Regressor.with_moments(moments, x[few], space, metric)
    few_addend, held_addend = (None, None) if addend is None else (addend[few], addend[held])
    activated = activation(target[held])

    def error(fitted: LowRank) -> Tensor:
        return squared_error(fitted, activated, x[held], held_addend, activation)

    ridged = plain.ridged(moments, share)
    start = Descent(target[few], y[few], rank, activation, ridged, seen, addend=few_addend, quick=True)
    best = _Trial(share, start, error)
    for weaker in _weaker(share, moments.least_share):
        trial = _Trial(weaker, start.restarted(plain.ridged(moments, weaker)), error)
        if min(trial.errors) >= min(best.errors):  # a share that is weaker still would do worse
            break
        best = trial
    del start
    best.run(ITERATIONS)
    errors, best_share = best.errors, best.share
    iterations = min(range(len(errors)), key=errors.__getitem__)
    del best  # its tensors make room for those of all rows
    whole = Regressor.with_moments(everything.moments, x, replace(space, share=best_share), metric)
    final = Descent(target, y, rank, activation, whole, everything, addend=addend, quick=True)
    for step in range(iterations):
        final.sweep(WEIGHT, measure=False)
        final.advance(exact=step == iterations - 1)
    size, seen_error = Number(final.squared_size(held)), Number(final.squared_error(held))
    gap = Gap(len(y), len(y[few]), size.read(), seen_error.read(), errors[iterations])
    return UnseenFit(whole.on_responses(final.current), iterations, best_share, errors, gap)


def _weaker(share: float, least: float) -> list[float]:
    """Shares to try beside the linear fit's: through an activation and at a low rank a fit has more to change."""
    if share == 0.0:
        return []
    return [share / WEAKER, 0.0] if share / WEAKER > least else [0.0]


class _Trial:
    """A descent, ``HEAT`` iterations to begin with, and its squared errors on the held-out samples: of the linear fit,
    then after each iteration."""

    def __init__(self, share: float, descent: Descent, error: Callable[[LowRank], Tensor]):
        self.share = share
        self._descent, self._error = descent, error
        self._looks = [Number(error(descent.current))]
        self.run(HEAT)

    @property
    def errors(self) -> tuple[float, ...]:
        return tuple(look.read() for look in self._looks)

    def run(self, iterations: int) -> None:
        """Up to this many iterations in all, or until the error no longer falls. A GPU never waits: the error before
        the last one decides whether to stop."""
        while self._descent.iterations < iterations:
            if len(self._looks) > PATIENCE + 1:
                before, now = self._looks[-2 - PATIENCE].read(), self._looks[-2].read()
                if before - now <= TOLERANCE * before:
                    break
            self._descent.sweep(WEIGHT, measure=False)
            self._descent.advance()
            self._looks.append(Number(self._error(self._descent.current)))
