"""The forms there are, and which of them a run may choose from: its scheme."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from leanconv.errors import LeanconvError, listing
from leanconv.forms.base import RESPONSES, Axis, Form
from leanconv.forms.channel import Channel
from leanconv.forms.merged import Merged
from leanconv.forms.spatial import Spatial
from leanconv.forms.three_d import ThreeD
from leanconv.forms.tucker2 import Tucker2
from leanconv.network.layers.geometry import Geometry

CHANNEL, SPATIAL, THREE_D, TUCKER2, MERGED = Channel(), Spatial(), ThreeD(), Tucker2(), Merged()
FORMS: dict[str, Form] = {form.name: form for form in (CHANNEL, SPATIAL, THREE_D, TUCKER2, MERGED)}


@dataclass(frozen=True)
class Scheme:
    """Forms in the order they are tried; those with more ranks last."""

    name: str
    forms: tuple[Form, ...]

    def applicable(self, geometry: Geometry) -> tuple[Form, ...]:
        return tuple(form for form in self.forms if form.applies(geometry))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Whose spectra are needed."""
        return tuple(dict.fromkeys(axis for form in self.forms for axis in form.axes))

    @property
    def fitted(self) -> bool:
        """Whether layers are fitted to their responses; else their filters alone decide."""
        return RESPONSES in self.axes

    @property
    def paired(self) -> tuple[Form, ...]:
        """Forms with more than one rank."""
        return tuple(form for form in self.forms if len(form.axes) > 1)

    @property
    def merges(self) -> bool:
        """Whether some form ends in 1 x 1 filters that another layer may take in."""
        return any(form.pointwise_end for form in self.forms)

    @property
    def sweeps(self) -> int:
        """How often splits are fitted in turns, in a scheme that can."""
        return max(getattr(form, "sweeps", 0) for form in self.forms) if self.fitted else 0

    def with_sweeps(self, sweeps: int) -> Scheme:
        """The same forms with their splits fitted in turns."""
        changed = (replace(form, sweeps=sweeps) if isinstance(form, Spatial) else form for form in self.forms)
        return replace(self, forms=tuple(changed))


SCHEMES: dict[str, Scheme] = {
    "channel": Scheme("channel", (CHANNEL,)),
    "spatial": Scheme("spatial", (SPATIAL,)),
    "3d": Scheme("3d", (CHANNEL, SPATIAL, THREE_D)),
    "tucker2": Scheme("tucker2", (CHANNEL, TUCKER2)),
}


def as_scheme(value: Any) -> Scheme:
    """A scheme by its name, by its form with the form's options, or as a tuple of forms."""
    if isinstance(value, Scheme):
        return value
    if isinstance(value, str) and value in SCHEMES:
        return SCHEMES[value]
    if value == "spatial-sgd":
        raise LeanconvError(
            "scheme='spatial-sgd' is no part of leanconv any more; use scheme='spatial', and train its result with "
            "train_spatial_pairs of benchmarks/peers/spatial_sgd.py."
        )
    if isinstance(value, str) and "+" in value:
        value = [word for word in value.split("+") if word]
    if isinstance(value, Form) and value.name in SCHEMES:
        return SCHEMES[value.name].with_sweeps(getattr(value, "sweeps", 0))
    if isinstance(value, Iterable) and not isinstance(value, str):
        items = [FORMS.get(item, item) if isinstance(item, str) else item for item in value]
        forms = [item for item in items if isinstance(item, Form)]
        if forms and len(forms) == len(items):
            ordered = tuple(sorted(dict.fromkeys(forms), key=lambda form: len(form.axes)))
            named = next((name for name, known in SCHEMES.items() if known.forms == ordered), None)
            # One form alone is not the scheme of its name, which has simpler forms too.
            return Scheme(named or "+".join(form.name for form in ordered) + "+" * (len(ordered) == 1), ordered)
    words = listing([repr(name) for name in SCHEMES])
    raise LeanconvError(f"scheme={value!r} is not known; use {words}, or forms such as leanconv.ThreeD(sweeps=3).")
