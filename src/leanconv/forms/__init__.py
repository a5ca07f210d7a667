"""How a layer may be replaced: one file a form, and its fit."""

from leanconv.forms.base import RESPONSES, Axis, Choice, Choices, Form, Ranks
from leanconv.forms.schemes import CHANNEL, FORMS, MERGED, SCHEMES, SPATIAL, THREE_D, TUCKER2, Scheme, as_scheme

__all__ = [
    "CHANNEL",
    "FORMS",
    "MERGED",
    "RESPONSES",
    "SCHEMES",
    "SPATIAL",
    "THREE_D",
    "TUCKER2",
    "Axis",
    "Choice",
    "Choices",
    "Form",
    "Ranks",
    "Scheme",
    "as_scheme",
]
