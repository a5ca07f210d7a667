"""Ranks by what they do to the output: what is measured of every layer, and what follows for all its forms.

A form of a layer loses a share of the energy of its responses. For d' this is the tail of their spectrum, for d'' that
of the filters as the layer sees them. So both are on one scale, and the losses of a 3d pair add. What a loss does to
the output was measured at a few losses, layer by layer. This says how much energy each layer may lose for the same
change of the output; losses count in that unit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from leanconv.forms import Axis, Choice
from leanconv.ranks.candidates import Candidate, Energies
from leanconv.ranks.select import Merit

# Changes under LEAST are rounding: a layer that the output does not depend on has only those. No curve exceeds MOST.
LEAST, MOST = 1e-9, 1e6
# Losses are compared at one change of the output: the median, over the layers, of the change by this loss.
USUAL = 0.1
# Fitting a layer repairs part of what the layers before it have lost: this is worth so much loss of its own.
REFIT = 0.02

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class LayerSensitivity:
    """Measurements of one layer. ``output``: (share of the responses' energy lost, relative change of the output).
    ``splits``: for each axis of the filters, their energies as the layer sees them, where that was looked at."""

    output: Points
    splits: Mapping[Axis, Energies] = field(default_factory=dict)


class Curve:
    """A rising curve through points, after isotonic regression: straight lines where both axes are logarithmic. The
    last line continues beyond the last point; before the first point the curve is x ** ``power``, 0 at 0."""

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
        """The index of the first point of at least ``at`` on an axis, or of the last point, and the slope before it."""
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
    """The share of its response energy that each layer alone may lose for the same change of the output; USUAL where
    nothing was measured, as for a layer whose responses never vary."""
    # The energy of a small change goes through in proportion.
    known = {name: one.output for name, one in measured.items() if any(loss > 0 for loss, _ in one.output)}
    curves = {name: Curve(points, 0.5) for name, points in known.items()}
    usual = statistics.median(curve(USUAL) for curve in curves.values()) if curves else 0.0
    return {name: curves[name].reaches(usual) if name in curves else USUAL for name in measured}


def least_change(measured: Mapping[str, LayerSensitivity], *, refits: bool) -> Merit:
    """The merit that ``select`` makes largest in sum: minus the loss of every layer, in the unit of this layer.

    Losses are added, not the changes of the output by each: small losses pass the later layers as energies, which add,
    and the effect of their sum is the same for all plans.

    The unit is the root of what a layer may lose, half way between that and one unit for all: it was measured on few
    images, one layer at a time, with nothing solved behind it.

    ``refits``: whether a layer in factors is fitted to the input it will have; a whole layer is not.
    """
    units = {name: math.sqrt(loss) for name, loss in allowed(measured).items()}

    def merit(candidate: Candidate, choice: Choice | None) -> float:
        if choice is None:
            return -REFIT / units[candidate.name] if refits else 0.0
        return -lost(candidate, choice, measured[candidate.name].splits) / units[candidate.name]

    return merit


def lost(candidate: Candidate, choice: Choice, splits: Mapping[Axis, Energies]) -> float:
    """Share of the response energy. ``splits``: of the filters as the layer sees them; without, responses are taken to
    lose what filters lose."""
    total = 0.0
    for axis, rank in zip(choice.form.axes, choice.ranks, strict=True):
        energies = splits.get(axis) or candidate.spectrum(axis)
        if energies is not None:
            total += 1.0 - energies.kept[rank]
    return total
