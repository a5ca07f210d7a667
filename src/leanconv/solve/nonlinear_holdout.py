"""Low rank through the activation, judged by samples it was not fitted to: how far to go, how far to trust them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leanconv.solve.activations import Activation
from leanconv.solve.device import Number
from leanconv.solve.generalization_gap import Gap
from leanconv.solve.holdout import Parts
from leanconv.solve.low_rank import LowRank
from leanconv.solve.nonlinear import Descent, squared_error
from leanconv.solve.reduced_rank import Regressor, linear
from leanconv.solve.response_space import ResponseSpace
from leanconv.solve.ridge import strength
from leanconv.solve.sums import Sums

# lambda of the z-step. Where there is noise to learn it matters how far one goes and hardly on which way (0.3, 1 and 3
# were tried); 0.3 takes the fewest iterations.
WEIGHT = 0.3
ITERATIONS = 50  # at most

# The linear fit's share of pseudo-samples, one so many times weaker and none go so many iterations; the best goes on.
WEAKER = 30
HEAT = 5

# It is over where the error has fallen by less than this share in so many iterations.
TOLERANCE = 1e-3
PATIENCE = 5


@dataclass(frozen=True)
class UnseenFit:
    """``map``: fitted to all samples, with ``iterations`` and ``share`` of pseudo-samples that did best on the samples
    held out; ``errors``: the squared errors there of the fit to the others, the linear one first, and then iteration
    by iteration (none where nothing was iterated); ``gap``: between the errors of both there, which says whether more
    samples would help (None without an activation)."""

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
) -> UnseenFit:
    """``nonlinear``, or ``reduced_rank`` where ``activation`` is None, that does not fit the noise of its samples.

    Behind a ReLU only active responses say anything: in a deep layer one of ten, from a few hundred images. A solver
    that goes on until the samples are matched gets worse on other images. ``parts``: rows to fit to and all the others,
    of other images. These choose the weight of pseudo-samples whose response is their target (a ridge towards the layer
    as it is) and when to stop. With both, everything is then fitted to all rows. ``symmetric``: the target is ``y`` and
    what is added to it, so that a linear fit has nothing to correct, and nothing to say about a ridge.

    Cost: that of two ``nonlinear`` of as many iterations, up to three times ``HEAT`` more, and a few O(m^3). The gap's
    is one look at the rows held out.
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

    seen, judging = _sums(target, y, x, addend, (few, held))
    share = 0.0 if symmetric else strength(seen, judging, space.prior)
    everything = seen.joined(judging)

    if activation is None:
        whole = Regressor.with_moments(everything.moments, x, replace(space, share=share))
        return UnseenFit(whole.on_responses(linear(everything, rank, whole, y.dtype)), 0, share, ())

    def added(part: slice) -> Tensor | None:
        return None if addend is None else addend[part]

    moments = seen.moments
    plain = Regressor.with_moments(moments, x[few], space)
    first = plain.ridged(moments, space.prior, share)
    begun = Descent(target[few], y[few], rank, activation, first, seen, addend=added(few))
    best = _best(
        begun,
        _HeldOut(activation(target[held]), x[held], added(held), activation),
        lambda share: plain.ridged(moments, space.prior, share),
        [share, *_weaker(share, moments.least_share)],
    )
    errors, share = best.errors, best.share
    iterations = min(range(len(errors)), key=errors.__getitem__)
    del begun, best
    whole = Regressor.with_moments(everything.moments, x, replace(space, share=share))
    final = Descent(target, y, rank, activation, whole, everything, addend=addend)
    for step in range(iterations):
        final.sweep(WEIGHT, measure=False)
        final.advance(exact=step == iterations - 1)
    size, error = Number(final.squared_size(held)), Number(final.squared_error(held))
    gap = Gap(len(y), len(y[few]), size.read(), error.read(), errors[iterations])
    return UnseenFit(whole.on_responses(final.current), iterations, share, errors, gap)


def _sums(target: Tensor, y: Tensor, x: Tensor, addend: Tensor | None, parts: tuple[slice, slice]) -> list[Sums]:
    """Of the rows fitted to and of those held out."""
    wanted = target if addend is None else target - addend
    found = []
    for part in parts:
        seen = y[part]
        found.append(Sums.of(seen if wanted is y else wanted[part], seen, x[part]))
    return found


def _best(
    begun: Descent, held_out: _HeldOut, regressor: Callable[[float], Regressor], shares: Sequence[float]
) -> _Trial:
    """The trial of one of the ``shares``, gone to its end. ``begun``: the descent with the first of them."""
    best = _Trial(shares[0], begun, held_out)
    best.go(HEAT)
    for share in shares[1:]:
        other = _Trial(share, begun.restarted(regressor(share)), held_out)
        other.go(HEAT)
        if min(other.errors) < min(best.errors):
            best = other
    best.go(ITERATIONS)
    return best


def _weaker(share: float, least: float) -> list[float]:
    """What else is tried: through an activation and at a low rank a fit has more to change than a linear one."""
    if share == 0.0:
        return []
    return [share / WEAKER, 0.0] if share / WEAKER > least else [0.0]


class _HeldOut:
    """Samples of other images, and the error of a map there."""

    def __init__(self, activated: Tensor, x: Tensor, addend: Tensor | None, activation: Activation):
        self._of = activated, x, addend, activation

    def error(self, fitted: LowRank) -> Tensor:
        return squared_error(fitted, *self._of)


class _Trial:
    """A descent and its errors on samples held out, of the linear fit and after each iteration."""

    def __init__(self, share: float, descent: Descent, held_out: _HeldOut):
        self.share = share
        self._descent, self._held_out = descent, held_out
        self._looks = [Number(held_out.error(descent.current))]

    @property
    def errors(self) -> tuple[float, ...]:
        return tuple(look.read() for look in self._looks)

    def go(self, iterations: int) -> None:
        """Until there were so many, or the error no longer falls. A GPU is never kept waiting: whether to stop is asked
        of the look before the last."""
        while self._descent.iterations < iterations:
            if len(self._looks) > PATIENCE + 1:
                before, now = self._looks[-2 - PATIENCE].read(), self._looks[-2].read()
                if before - now <= TOLERANCE * before:
                    break
            self._descent.sweep(WEIGHT, measure=False)
            self._descent.advance()
            self._looks.append(Number(self._held_out.error(self._descent.current)))
