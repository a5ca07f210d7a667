"""Ranks by what they do to the output: a few measurements of every layer, and what follows for all its forms.

A form of a layer loses a share of the energy of its responses: of d' that is the tail of their spectrum, of d'' what
was measured at a few d''. So both stand on one scale, and the losses of a 3d pair add. What a loss does to the output
was measured at a few losses, layer by layer: it says how much of its energy each layer may lose for one and the same
change of the output, and losses count in that unit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from leanconv.forms import RESPONSES, Axis, Choice
from leanconv.ranks.candidates import Candidate
from leanconv.ranks.select import Merit

# Changes under this are rounding; a layer the output does not depend on has no others. No curve goes beyond the latter.
LEAST, MOST = 1e-9, 1e6
# The change that losses are compared at is the one a loss of this brings about in the middle one of the layers.
USUAL = 0.1
# Fitting a layer makes up for some of what the layers before it have lost: it is worth this loss of its own.
REFIT = 0.02

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class LayerSensitivity:
    """Of one layer. ``output``: (share of the responses' energy lost, relative change of the output in length);
    ``splits``: for each axis of the filters, (share of the filters' energy lost, share of the responses' energy lost)
    at some ranks."""

    output: Points
    splits: Mapping[Axis, Points] = field(default_factory=dict)


class Curve:
    """A rising curve through points, straight between them where both axes are logarithmic, after isotonic regression.
    It goes on beyond the last point as before it; before the first like x ** ``power``: 0 at 0."""

    def __init__(self, points: Points, power: float):
        known = sorted({math.log(x): math.log(max(y, LEAST)) for x, y in points if x > 0}.items())
        self._x = [x for x, _ in known]
        self._y = isotonic([y for _, y in known])
        self._power = power

    def __call__(self, x: float) -> float:
        if x <= 0 or not self._x:
            return 0.0
        at = math.log(x)
        number, slope = self._line(self._x, at)
        return math.exp(min(self._y[number] + slope * (at - self._x[number]), math.log(MOST)))

    def reaches(self, y: float) -> float:
        """The x at which it is as high as ``y``, no more than MOST."""
        at = math.log(max(y, LEAST))
        number, slope = self._line(self._y, at)
        rise = at - self._y[number]
        if rise > 0 and slope * math.log(MOST) < rise:
            return MOST
        return min(MOST, math.exp(self._x[number] + (rise / slope if rise else 0.0)))

    def _line(self, axis: list[float], at: float) -> tuple[int, float]:
        """The first point that is no less than ``at`` on an axis, or the last one, and the slope before it."""
        number = next((i for i, known in enumerate(axis) if known >= at), len(axis) - 1)
        if number == 0:
            return 0, self._power
        wide = self._x[number] - self._x[number - 1]
        return number, (self._y[number] - self._y[number - 1]) / wide


def isotonic(values: list[float]) -> list[float]:
    """The nearest sequence, in least squares, that does not fall: neighbours that do are averaged.

    >>> isotonic([1.0, 3.0, 2.0, 4.0])
    [1.0, 2.5, 2.5, 4.0]
    """
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, m), (b, n) = blocks[-2:]
            blocks[-2:] = [((m * a + n * b) / (m + n), m + n)]
    return [value for value, count in blocks for _ in range(count)]


def allowed(measured: Mapping[str, LayerSensitivity]) -> dict[str, float]:
    """What each layer alone may lose of its responses' energy for one and the same change of the output; what is usual
    where nothing was measured, as of a layer whose responses never vary."""
    # The energy of a small change goes through in proportion.
    known = {name: one.output for name, one in measured.items() if any(loss > 0 for loss, _ in one.output)}
    curves = {name: Curve(points, 0.5) for name, points in known.items()}
    usual = statistics.median(curve(USUAL) for curve in curves.values()) if curves else 0.0
    return {name: curves[name].reaches(usual) if name in curves else USUAL for name in measured}


def least_change(measured: Mapping[str, LayerSensitivity], *, refits: bool) -> Merit:
    """What ``select`` is to make largest in sum: minus the losses of all layers, each in the unit of its own.

    Losses are added, not the changes they bring about alone: small ones go through the layers behind them as energies,
    which add, and what is made of their sum in the end is the same for all plans.

    The unit is the root of what a layer is allowed to lose, half way between that and the same for all: it was measured
    on few images, in one layer at a time, with nothing solved behind it.

    ``refits``: a layer in factors is fitted to the input it will have, and one that stays whole is not.
    """
    units = {name: math.sqrt(loss) for name, loss in allowed(measured).items()}
    splits = {
        name: {axis: Curve(points, 1.0) for axis, points in one.splits.items() if points}
        for name, one in measured.items()
    }

    def merit(candidate: Candidate, choice: Choice | None) -> float:
        if choice is None:
            return -REFIT / units[candidate.name] if refits else 0.0
        return -lost(candidate, choice, splits[candidate.name]) / units[candidate.name]

    return merit


def lost(candidate: Candidate, choice: Choice, splits: Mapping[Axis, Curve]) -> float:
    """Share of the energy of the responses. Where no split was looked at, as if responses lost what filters lose."""
    total = 0.0
    for axis, kept in candidate.kept(choice).items():
        if candidate.spectrum(axis) is not None:
            total += 1.0 - kept if axis is RESPONSES else splits.get(axis, AS_FILTERS)(1.0 - kept)
    return total


AS_FILTERS = Curve(((1.0, 1.0),), 1.0)
