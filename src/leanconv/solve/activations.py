"""Activations and their z-steps.

The z-step of the nonlinear solver is, element by element,

    z = argmin (r(t) - r(z))^2 + lambda (z - v)^2

with t the true response and v the current approximation of it. It is solved in closed form where r is piecewise
linear and by safeguarded Newton where it is smooth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Parameter = float | Tensor


class Activation(Protocol):
    """r, and the z-step through it. Tensors are n x d; a per-channel parameter is a tensor of length d."""

    def __call__(self, y: Tensor) -> Tensor: ...

    def z_step(self, target: Tensor, activated: Tensor, v: Tensor, weight: float) -> Tensor:
        """``target`` t, ``activated`` r(t), ``v`` the approximation, ``weight`` lambda > 0. May overwrite ``v``."""
        ...


class Relu:
    """max(0, y). The two candidates of ``method.md`` collapse to one comparison.

    For v > 0 the branch z1 = (lambda v + r) / (lambda + 1) always wins. For v <= 0, z0 = v costs r^2 and z1
    costs lambda / (lambda + 1) (r - v)^2, so z1 wins exactly where v > -kappa r, kappa = (1 - s) / s,
    s = sqrt(lambda / (lambda + 1)).
    """

    def __call__(self, y: Tensor) -> Tensor:
        return y.clamp_min(0.0)

    def z_step(self, target: Tensor, activated: Tensor, v: Tensor, weight: float) -> Tensor:
        s = math.sqrt(weight / (weight + 1.0))
        kappa = (1.0 - s) / s
        margin = torch.add(v, activated, alpha=kappa)
        pull = torch.sub(activated, v)
        # pull where margin > 0, else 0. ReLU's backward kernel is that, vectorised: where() takes five times longer.
        pull = torch.ops.aten.threshold_backward.default(pull, margin, 0.0)
        return v.add_(pull, alpha=1.0 / (weight + 1.0))


class Clipped:
    """min(max(y, low), high). Each end is like ``Relu``'s: beyond it z = v, or the pull wins where v is near enough."""

    def __init__(self, low: float, high: float):
        self._low, self._high = low, high

    def __call__(self, y: Tensor) -> Tensor:
        return y.clamp(self._low, self._high)

    def z_step(self, target: Tensor, activated: Tensor, v: Tensor, weight: float) -> Tensor:
        s = math.sqrt(weight / (weight + 1.0))
        kappa = (1.0 - s) / s
        margin = torch.add(v, activated, alpha=kappa)
        pull = torch.sub(activated, v)
        # Kept where low (1 + kappa) < margin < high (1 + kappa).
        pull = torch.ops.aten.threshold_backward.default(pull, margin, self._low * (1.0 + kappa))
        pull = torch.ops.aten.threshold_backward.default(pull, margin.neg_(), -self._high * (1.0 + kappa))
        return v.add_(pull, alpha=1.0 / (weight + 1.0))


class PiecewiseLinear:
    """r(y) = slope y + offset on each of the intervals cut at ``knots`` (rising)."""

    def __init__(self, function: Callable[[Tensor], Tensor], pieces: Sequence[tuple[float, float, Parameter, float]]):
        self._function = function
        self._pieces = pieces  # (low, high, slope, offset)

    def __call__(self, y: Tensor) -> Tensor:
        return self._function(y)

    def z_step(self, target: Tensor, activated: Tensor, v: Tensor, weight: float) -> Tensor:
        def best_on(low: float, high: float, slope: Parameter, offset: float) -> tuple[Tensor, Tensor]:
            free = (slope * (activated - offset) + weight * v) / (slope * slope + weight)
            z = free.clamp(low, high)
            return z, (activated - slope * z - offset).square() + weight * (z - v).square()

        best, best_cost = best_on(*self._pieces[0])
        for piece in self._pieces[1:]:
            z, cost = best_on(*piece)
            best = torch.where(cost < best_cost, z, best)
            best_cost = torch.minimum(cost, best_cost)
        return best


class Smooth:
    """A differentiable r with its derivatives, cut at ``cuts`` (rising) into branches on which it is monotone.

    The cost can have a valley on every branch, and on a monotone branch the lowest point lies towards the target.
    So, on each branch: scan points between v and t and the ``landmarks`` (all moved into the branch), take the best,
    then Newton with the Gauss-Newton curvature where the true one is not positive, kept inside the branch, halving
    any step that does not descend. The best branch wins.
    """

    SCAN = 6
    NEWTON = 12
    MARGIN = 1e-5  # branches end this far from a cut, where the derivatives are those of the branch

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        derivatives: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
        cuts: tuple[float, ...] = (),
        landmarks: tuple[float, ...] = (),
    ):
        self._function = function
        self._derivatives = derivatives
        self._landmarks = landmarks
        lows = [-math.inf, *(cut + self.MARGIN for cut in cuts)]
        highs = [*(cut - self.MARGIN for cut in cuts), math.inf]
        self._branches = list(zip(lows, highs, strict=True))

    def __call__(self, y: Tensor) -> Tensor:
        return self._function(y)

    def z_step(self, target: Tensor, activated: Tensor, v: Tensor, weight: float) -> Tensor:
        best, best_cost = v, (activated - self._function(v)).square()
        for low, high in self._branches:
            z, cost = self._search(target, activated, v, weight, low, high)
            best = torch.where(cost < best_cost, z, best)
            best_cost = torch.minimum(cost, best_cost)
        return best

    def _search(
        self, target: Tensor, activated: Tensor, v: Tensor, weight: float, low: float, high: float
    ) -> tuple[Tensor, Tensor]:
        def cost_at(z: Tensor) -> Tensor:
            return (activated - self._function(z)).square() + weight * (z - v).square()

        z = v.clamp(low, high)
        cost = cost_at(z)
        candidates = [torch.lerp(v, target, step / self.SCAN) for step in range(1, self.SCAN + 1)]
        candidates += [torch.full_like(v, point) for point in self._landmarks if low < point < high]
        for candidate in candidates:
            candidate.clamp_(low, high)
            candidate_cost = cost_at(candidate)
            z = torch.where(candidate_cost < cost, candidate, z)
            cost = torch.minimum(candidate_cost, cost)

        stride = torch.ones_like(z)
        for _ in range(self.NEWTON):
            value, slope, bend = self._derivatives(z)
            residual = activated - value
            # Half of the first and second derivative of the cost.
            gradient = weight * (z - v) - residual * slope
            gauss_newton = slope.square() + weight
            newton = gauss_newton - residual * bend
            curvature = torch.where(newton > 0.1 * gauss_newton, newton, gauss_newton)
            trial = (z - stride * gradient / curvature).clamp_(low, high)
            trial_cost = cost_at(trial)
            descends = trial_cost <= cost
            z = torch.where(descends, trial, z)
            cost = torch.where(descends, trial_cost, cost)
            stride = torch.where(descends, (2 * stride).clamp_max(1.0), 0.5 * stride)
        return z, cost


def _silu(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s = torch.sigmoid(z)
    g = s * (1 - s)
    return z * s, s + z * g, g * (2 + z * (1 - 2 * s))


def _gelu(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    cdf = 0.5 * (1 + torch.erf(z * math.sqrt(0.5)))
    pdf = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return z * cdf, cdf + z * pdf, pdf * (2 - z.square())


def _gelu_tanh(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(a * (z + b * z**3))
    du = a * (1 + 3 * b * z.square())
    sech2 = 1 - t.square()
    slope = 0.5 * (1 + t) + 0.5 * z * sech2 * du
    bend = sech2 * du + 0.5 * z * (sech2 * a * 6 * b * z - 2 * t * sech2 * du.square())
    return 0.5 * z * (1 + t), slope, bend


def _hardswish(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    inside = (z > -3) & (z < 3)
    above = (z >= 3).to(z.dtype)
    slope = torch.where(inside, (2 * z + 3) / 6, above)
    return F.hardswish(z), slope, inside.to(z.dtype) / 3


def _sigmoid(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s = torch.sigmoid(z)
    g = s * (1 - s)
    return s, g, g * (1 - 2 * s)


def _tanh(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    t = torch.tanh(z)
    g = 1 - t.square()
    return t, g, -2 * t * g


def _mish(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s, t = torch.sigmoid(z), torch.tanh(F.softplus(z))
    slope_of_t = (1 - t.square()) * s
    return z * t, t + z * slope_of_t, slope_of_t * (2 + z * (1 - s - 2 * t * s))


def _softplus(beta: float, threshold: float) -> Smooth:
    """log(1 + exp(beta y)) / beta, and y itself above threshold / beta."""

    def derivatives(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = torch.sigmoid(beta * z)
        above = beta * z > threshold
        slope = torch.where(above, torch.ones_like(z), s)
        bend = torch.where(above, torch.zeros_like(z), beta * s * (1 - s))
        return F.softplus(z, beta, threshold), slope, bend

    # It falls there by log(1 + exp(-threshold)) / beta, which is less than rounding for all but small thresholds.
    cuts = (threshold / beta,) if threshold < NO_JUMP else ()
    return Smooth(lambda y: F.softplus(y, beta, threshold), derivatives, cuts)


def _elu(alpha: float) -> Smooth:
    def derivatives(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tail = alpha * torch.exp(z.clamp_max(0.0))
        below = z < 0
        slope = torch.where(below, tail, torch.ones_like(z))
        bend = torch.where(below, tail, torch.zeros_like(z))
        return torch.where(below, tail - alpha, z), slope, bend

    return Smooth(lambda y: F.elu(y, alpha), derivatives, (0.0,))


def _leaky(slope: Parameter) -> PiecewiseLinear:
    pieces = [(-math.inf, 0.0, slope, 0.0), (0.0, math.inf, 1.0, 0.0)]
    return PiecewiseLinear(lambda y: torch.where(y >= 0, y, slope * y), pieces)


# Softplus thresholds from which its jump is lost in float32.
NO_JUMP = 15.0
_AROUND_DIP = (0.0, -0.2, -0.5, -1.0, -1.7, -2.4, -2.9, -4.0)

# Cuts are where the slope is zero (the dip of SiLU, GELU, Hardswish and Mish) or jumps.
_MAKERS: dict[str, Callable[[Mapping[str, Parameter]], Activation]] = {
    "identity": lambda p: PiecewiseLinear(lambda y: y, [(-math.inf, math.inf, 1.0, 0.0)]),
    "relu": lambda p: Relu(),
    "leaky_relu": lambda p: _leaky(float(p.get("slope", 0.01))),
    "prelu": lambda p: _leaky(p["slope"]),
    "relu6": lambda p: Clipped(0.0, 6.0),
    "hardtanh": lambda p: Clipped(float(p.get("low", -1.0)), float(p.get("high", 1.0))),
    "silu": lambda p: Smooth(F.silu, _silu, (-1.2784645,), _AROUND_DIP),
    "gelu": lambda p: Smooth(F.gelu, _gelu, (-0.7517916,), _AROUND_DIP),
    "gelu_tanh": lambda p: Smooth(lambda y: F.gelu(y, approximate="tanh"), _gelu_tanh, (-0.7524614,), _AROUND_DIP),
    "hardswish": lambda p: Smooth(F.hardswish, _hardswish, (-3.0, -1.5, 3.0), (2.9, *_AROUND_DIP)),
    "elu": lambda p: _elu(float(p.get("alpha", 1.0))),
    "sigmoid": lambda p: Smooth(torch.sigmoid, _sigmoid),
    "tanh": lambda p: Smooth(torch.tanh, _tanh),
    "mish": lambda p: Smooth(F.mish, _mish, (-1.1924312,), _AROUND_DIP),
    "softplus": lambda p: _softplus(float(p.get("beta", 1.0)), float(p.get("threshold", 20.0))),
}

NAMES = tuple(_MAKERS)


def activation(name: str, **parameters: Parameter) -> Activation:
    """The activation called ``name`` (one of ``NAMES``): leaky_relu(slope), prelu(slope: d), hardtanh(low, high),
    elu(alpha), softplus(beta, threshold), the others without parameters."""
    return _MAKERS[name](parameters)
