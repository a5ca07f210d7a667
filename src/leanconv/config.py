"""What ``accelerate`` was asked to do, checked in one place."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from leanconv.errors import LeanconvError, listing, whole
from leanconv.network.layers.geometry import Scheme
from leanconv.runtimes.target import Target

Solver = Literal["linear", "nonlinear"]
Layers = Literal["conv", "all"]
Refine = Literal["none", "closed-form", "distill"]

SOLVERS = ("linear", "nonlinear")
RANKS = ("uniform", "energy", "sensitivity", "latency")
LAYERS = ("conv", "all")
REFINE = ("none", "closed-form", "distill")
# Schemes in which a layer is fitted to its responses, in closed form.
FITTED = ("3d", "channel")
SCHEMES: tuple[Scheme, ...] = ("channel", "spatial", "3d")
# Positions looked at a layer, where it is to be found out how many it needs.
MOST = 200_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of one call. ``ranks`` is a method or a mapping of layer to rank; ``skip`` None is the default."""

    speedup: float
    scheme: Scheme
    solver: Solver
    asymmetric: bool
    ranks: Literal["uniform", "energy", "sensitivity", "latency"] | Mapping[str, Any]
    skip: tuple[str, ...] | None
    layers: Layers
    samples: int | Literal["auto"]
    seed: int
    part: str | None = None
    target: Target | None = None  # what is timed, for ranks="latency"
    latency: float | None = None  # milliseconds the network is to take there, in place of ``speedup``
    refine: Refine = "none"
    steps: int | None = None  # of training, for refine="distill"; None: train.refine's own
    sweeps: int = 0  # turns in which both halves of spatial splits are fitted before a layer is

    @classmethod
    def check(
        cls,
        *,
        speedup: Any = 4.0,
        scheme: Any = "3d",
        solver: Any = "nonlinear",
        asymmetric: Any = True,
        ranks: Any = "energy",
        skip: Any = None,
        layers: Any = "conv",
        samples: Any = 50_000,
        seed: Any = 0,
        part: Any = None,
        target: Any = None,
        latency: Any = None,
        refine: Any = None,
        steps: Any = None,
        sweeps: Any = 0,
    ) -> Options:
        """Options from raw arguments, or a LeanconvError that names the wrong one."""
        if isinstance(scheme, str) and scheme == "spatial-sgd":
            raise LeanconvError(
                "scheme='spatial-sgd' is no part of leanconv any more; use scheme='spatial', and train its result with "
                "train_spatial_pairs of benchmarks/peers/spatial_sgd.py."
            )
        _one_of("scheme", scheme, SCHEMES)
        if refine is None:
            refine = "closed-form" if scheme in FITTED else "none"
        _one_of("solver", solver, SOLVERS)
        _one_of("layers", layers, LAYERS)
        _one_of("refine", refine, REFINE)
        if refine == "closed-form" and scheme not in FITTED:
            raise LeanconvError(
                f"refine={refine!r} is about the fit of a layer, and scheme={scheme!r} makes none of its kind; use "
                "scheme='3d' or 'channel'."
            )
        if steps is not None and refine != "distill":
            raise LeanconvError(f"steps={steps!r} goes with refine='distill' only; leave it out or give that.")
        if whole("sweeps", sweeps, 0) and scheme != "3d":
            raise LeanconvError(
                f"sweeps={sweeps!r} fits the spatial splits of scheme='3d', and scheme={scheme!r} was given; leave it "
                "out or give that."
            )
        if part is not None and not (isinstance(part, str) and part):
            raise LeanconvError(f"part={part!r} must be the path of a module, for example 'backbone'.")
        if not isinstance(ranks, Mapping):
            _one_of("ranks", ranks, RANKS, "or a dict {'layer': rank}")
            if latency is None:
                _check_speedup(speedup)
        timed = isinstance(ranks, str) and ranks == "latency"
        for name, value in (("target", target), ("latency", latency)):
            if value is not None and not timed:
                raise LeanconvError(f"{name}={value!r} goes with ranks='latency' only; leave it out or give that.")
        if latency is not None:
            _check_latency(latency)
        return cls(
            speedup=math.nan if isinstance(ranks, Mapping) or latency is not None else float(speedup),
            scheme=scheme,
            solver=solver,
            asymmetric=bool(asymmetric),
            ranks=dict(ranks) if isinstance(ranks, Mapping) else ranks,
            skip=None if skip is None else _names(skip),
            layers=layers,
            samples=_samples(samples),
            seed=whole("seed", seed, 0),
            part=part,
            target=Target.check(target) if timed else None,
            latency=None if latency is None else float(latency),
            refine=refine,
            steps=None if steps is None else whole("steps", steps, 1),
            sweeps=whole("sweeps", sweeps, 0),
        )

    @property
    def form(self) -> Scheme:
        """What a layer is replaced by."""
        return self.scheme

    @property
    def most_samples(self) -> int:
        """Positions a layer that are looked at; with "auto" it may be fitted to fewer."""
        return MOST if self.samples == "auto" else self.samples

    @property
    def closed_form(self) -> bool:
        """Whether layers are fitted for images not seen; before a distillation too."""
        return self.refine != "none"

    @property
    def free_filters(self) -> bool:
        """Whether 3d's horizontal filters are fitted freely."""
        return self.closed_form and self.form == "3d" and self.asymmetric

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Options:
        ranks, skip = data["ranks"], data["skip"]
        if isinstance(ranks, dict):
            ranks = {key: tuple(value) if isinstance(value, list) else value for key, value in ranks.items()}
        changed = {
            "speedup": math.nan if data["speedup"] is None else data["speedup"],
            "ranks": ranks,
            "skip": None if skip is None else tuple(skip),
            "target": None if data.get("target") is None else Target(**data["target"]),
        }
        return cls(**{**data, **changed})

    def to_json(self) -> dict[str, Any]:
        data = dict(vars(self))
        data["speedup"] = None if math.isnan(self.speedup) else self.speedup
        data["skip"] = None if self.skip is None else list(self.skip)
        data["target"] = None if self.target is None else self.target.to_json()
        if isinstance(self.ranks, Mapping):
            data["ranks"] = {
                k: [int(n) for n in v] if isinstance(v, (tuple, list)) else int(v) for k, v in self.ranks.items()
            }
        return data


def _one_of(name: str, value: Any, allowed: Iterable[str], also: str = "") -> None:
    if not isinstance(value, str) or value not in allowed:
        words = listing([repr(item) for item in allowed]) + (f" {also}" if also else "")
        raise LeanconvError(f"{name}={value!r} is not known; use {words}.")


def _samples(value: Any) -> int | Literal["auto"]:
    if isinstance(value, str) and value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 1:
        raise LeanconvError(f"samples={value!r} must be a whole number from 1 on, or 'auto'.")
    return whole("samples", value, 1)


def _check_speedup(value: Any) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_number and 1 < value < 1e9):
        raise LeanconvError(f"speedup={value!r} must be a number above 1, for example 4.0.")


def _check_latency(value: Any) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_number and 0 < value < 1e9):
        raise LeanconvError(f"latency={value!r} must be milliseconds above 0, for example 50.")


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise LeanconvError(f"skip={value!r} is one string; give a list of layer names: [{value!r}].")
    try:
        names = tuple(value)
    except TypeError:
        raise LeanconvError(f"skip={value!r} must be a list of layer names, for example ['features.0'].") from None
    for name in names:
        if not isinstance(name, str):
            raise LeanconvError(f"skip contains {name!r}; give layer names as strings.")
    return names
