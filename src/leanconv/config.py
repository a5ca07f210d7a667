"""What ``accelerate`` was asked to do, checked in one place and kept with the result as plain data."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

from leanconv.errors import LeanconvError, whole
from leanconv.runtimes.target import Target
from leanconv.system.fields import check_fields, one_of, option

if TYPE_CHECKING:  # the command line's help is made from this module, and must not wait for torch
    from leanconv.forms import Scheme
    from leanconv.ranks.selector import RankSelector

Solver = Literal["linear", "nonlinear"]
Layers = Literal["conv", "all"]
Refine = Literal["none", "closed-form", "distill"]
REFINE: tuple[str, ...] = get_args(Refine)

# Positions looked at a layer, where it is to be found out how many it needs.
MOST = 200_000


@dataclass(frozen=True)
class Distill:
    """``refine=Distill(steps=...)``: the accelerated network is trained on the images, without labels, to have the
    original's feature maps. ``steps``: of training at most, to the end of an epoch; None: about 1,200, in at most 100
    epochs."""

    steps: int | None = None


def _forms(value: Any) -> Scheme:
    from leanconv.forms import as_scheme

    return as_scheme(value)


def _scheme(name: str, value: Any) -> str:
    return _forms(value).name


def _speedup(name: str, value: Any) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_number and (1 < value < 1e9 or value is math.nan)):
        raise LeanconvError(f"speedup={value!r} must be a number above 1, for example 4.0.")
    return float(value)


def _latency(name: str, value: Any) -> float:
    from leanconv.ranks.latency.selector import Latency

    Latency(ms=value)  # refuses what is no time
    return float(value)


def _samples(name: str, value: Any) -> int | Literal["auto"]:
    if isinstance(value, str) and value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 1:
        raise LeanconvError(f"samples={value!r} must be a whole number from 1 on, or 'auto'.")
    return whole("samples", value, 1)


def _part(name: str, value: Any) -> str:
    if not (isinstance(value, str) and value):
        raise LeanconvError(f"part={value!r} must be the path of a module, for example 'backbone'.")
    return value


def _names(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise LeanconvError(f"skip={value!r} is one string; give a list of layer names: [{value!r}].")
    try:
        names = tuple(value)
    except TypeError:
        raise LeanconvError(f"skip={value!r} must be a list of layer names, for example ['features.0'].") from None
    for each in names:
        if not isinstance(each, str):
            raise LeanconvError(f"skip contains {each!r}; give layer names as strings.")
    return names


def _ranks(name: str, value: Any) -> Any:
    from leanconv.ranks.selector import SELECTORS

    if isinstance(value, Mapping):
        return dict(value)
    return one_of("ranks", value, tuple(SELECTORS), "or a dict {'layer': rank}")


def _target(name: str, value: Any) -> Target:
    return Target.check(value)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of one call, as they are saved. Objects (a form as scheme, a selector as ranks, Distill as refine)
    come apart into plain fields; ``forms`` and ``selector`` make them again."""

    speedup: float = option(
        4.0, "Convolution MACs before / after; with latency ranks: time before / after.", check=_speedup
    )
    scheme: str = option(
        "3d", "The forms a layer may take: 3d, channel, spatial, or several joined by +.", check=_scheme
    )
    solver: Solver = option("nonlinear", "Fit responses (linear), or what is left of them behind the activation.")
    asymmetric: bool = option(True, "Fit each layer to the input the layers already accelerated give it.")
    ranks: Any = option(
        "auto",
        "auto (by sensitivity where possible), sensitivity (of the output to each layer), energy, uniform, latency, or "
        "ranks by hand: JSON or a .json file, {layer: rank}.",
        check=_ranks,
    )
    skip: tuple[str, ...] | None = option(
        None, "Layer to leave as it is (repeat). Default: the first convolution.", check=_names
    )
    layers: Layers = option("conv", "conv, or all to include Linear layers.")
    samples: Any = option(
        50_000, "Responses sampled a layer; auto: as many as a layer needs, up to 200,000.", check=_samples
    )
    seed: int = option(0, "Chooses the sampled positions.", at_least=0)
    part: str | None = option(
        None, "Accelerate, and count, only this module, for example backbone. Default: all.", check=_part
    )
    target: Target | None = option(None, "With latency ranks: what is timed.", check=_target)
    latency: float | None = option(
        None, "With latency ranks: milliseconds of the whole network, in place of a speed-up.", check=_latency
    )
    refine: Refine = option(
        "closed-form",
        "closed-form: fitted for images not seen, a few are held out; none: the paper's fit, and the default of "
        "spatial; distill: then trained without labels to respond as the original does, much slower.",
    )
    steps: int | None = option(None, "With distill: steps of training, at most. Default: about 1,200.", at_least=1)
    sweeps: int = option(
        0, "With 3d: fit both halves of every split to responses in so many turns; 3 are enough.", at_least=0
    )
    # A selector that has no name of ours. It is not saved.
    custom: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.forms.fitted and self.refine == "closed-form":
            raise LeanconvError(
                f"refine={self.refine!r} is about the fit of a layer, and scheme={self.scheme!r} makes none of its "
                "kind; use scheme='3d' or 'channel'."
            )
        if self.steps is not None and self.refine != "distill":
            raise LeanconvError(f"steps={self.steps!r} goes with refine='distill' only; leave it out or give that.")
        if self.sweeps and self.forms.sweeps != self.sweeps:
            raise LeanconvError(
                f"sweeps={self.sweeps!r} fits the spatial splits of scheme='3d', and scheme={self.scheme!r} was given; "
                "leave it out or give that."
            )
        for name in ("target", "latency"):
            if getattr(self, name) is not None and self.ranks != "latency":
                raise LeanconvError(
                    f"{name}={getattr(self, name)!r} goes with ranks='latency' only; leave it out or give that."
                )
        if isinstance(self.ranks, Mapping) or self.latency is not None:
            object.__setattr__(self, "speedup", math.nan)

    @classmethod
    def check(cls, **given: Any) -> Options:
        """From the arguments of ``accelerate``, or a LeanconvError that names the wrong one."""
        from leanconv.ranks.selector import SELECTORS, selector_of

        scheme = _forms(given.pop("scheme", "3d"))
        if scheme.sweeps:
            given["sweeps"] = scheme.sweeps
        refine = given.pop("refine", None)
        if isinstance(refine, Distill):
            given["steps"] = refine.steps
            refine = "distill"
        if refine is None:
            refine = "closed-form" if scheme.fitted else "none"
        ranks = given.pop("ranks", "auto")
        if not isinstance(ranks, (str, Mapping)):
            selector = selector_of(ranks)
            ranks = selector.name
            if ranks in SELECTORS:
                known = {"ms": "latency", "target": "target"}
                given |= {name: vars(selector)[own] for own, name in known.items() if own in vars(selector)}
            else:
                given["custom"], ranks = selector, "energy"
        if ranks == "latency" and given.get("target") is None:
            given["target"] = Target()
        if isinstance(ranks, Mapping) or given.get("latency") is not None:
            given["speedup"] = math.nan
        return cls(scheme=scheme.name, ranks=ranks, refine=refine, **given)

    def changed(self, **given: Any) -> Options:
        """With some of the arguments others; those that only went with the old ones are dropped."""
        kept = {each.name: getattr(self, each.name) for each in fields(self)}
        kept["scheme"] = self.forms
        if self.custom is not None:
            kept["ranks"] = kept.pop("custom")
        if "ranks" in given and not (isinstance(given["ranks"], str) and given["ranks"] == self.ranks):
            kept |= {"target": None, "latency": None, "custom": None}
        if "refine" in given and not (isinstance(given["refine"], str) and given["refine"] == self.refine):
            kept["steps"] = None
        return Options.check(**{**kept, **given})

    @cached_property
    def forms(self) -> Scheme:
        """The forms a layer may take."""
        scheme = _forms(self.scheme)
        return scheme.with_sweeps(self.sweeps) if self.sweeps else scheme

    @cached_property
    def selector(self) -> RankSelector:
        """Chooses the ranks; not for ranks by hand."""
        from leanconv.ranks.selector import selector_of

        if self.custom is not None:
            return self.custom  # type: ignore[no-any-return]
        timed = {"ms": self.latency, "target": self.target} if self.ranks == "latency" else {}
        return selector_of(self.ranks, **timed)

    @property
    def most_samples(self) -> int:
        """Positions a layer that are looked at; with "auto" it may be fitted to fewer."""
        return MOST if self.samples == "auto" else int(self.samples)

    @property
    def closed_form(self) -> bool:
        """Whether layers are fitted for images not seen; before a distillation too."""
        return self.refine != "none"

    @property
    def holds_out(self) -> bool:
        """Whether images are held out to check the result on. The paper's fit is to all of them; a scheme that fits
        nothing loses nothing by it."""
        return self.closed_form or not self.forms.fitted

    @property
    def free_filters(self) -> bool:
        """Whether the second half of a split is fitted freely to what it sees."""
        return self.closed_form and self.asymmetric and self.forms.fitted

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Options:
        from leanconv.ranks.selector import SELECTORS, SelectorOfUser

        ranks, skip, custom = data["ranks"], data["skip"], None
        if isinstance(ranks, str) and ranks not in SELECTORS:
            ranks, custom = "energy", SelectorOfUser(ranks)
        if isinstance(ranks, dict):
            ranks = {name: _ranks_from_json(given) for name, given in ranks.items()}
        changed = {
            "speedup": math.nan if data["speedup"] is None else data["speedup"],
            "ranks": ranks,
            "custom": custom,
            "skip": None if skip is None else tuple(skip),
            "target": None if data.get("target") is None else Target(**data["target"]),
        }
        return cls(**{**data, **changed})

    def to_json(self) -> dict[str, Any]:
        data = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "custom"}
        if self.custom is not None:
            data["ranks"] = self.custom.name
        data["speedup"] = None if math.isnan(self.speedup) else self.speedup
        data["skip"] = None if self.skip is None else list(self.skip)
        data["target"] = None if self.target is None else self.target.to_json()
        if isinstance(self.ranks, Mapping):
            data["ranks"] = {name: _ranks_as_json(given) for name, given in self.ranks.items()}
        return data


def _ranks_as_json(given: Any) -> Any:
    """Ranks by hand: a number, several, or a ``Choice`` as the name of its form and its ranks."""
    from leanconv.forms import Choice

    if isinstance(given, Choice):
        return [given.form.name, *given.ranks]
    if isinstance(given, (tuple, list)):
        return [_ranks_as_json(number) for number in given]
    return int(given) if isinstance(given, numbers.Integral) else given


def _ranks_from_json(data: Any) -> Any:
    from leanconv.forms import FORMS, Choice

    if not isinstance(data, list):
        return data
    return Choice(FORMS[data[0]], tuple(data[1:])) if data and data[0] in FORMS else tuple(data)
