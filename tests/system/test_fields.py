"""Options as dataclass fields: checked, and shown, by what each field says of itself."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, replace
from typing import Literal

import pytest

from leanconv.errors import LeanconvError
from leanconv.system.fields import check_fields, option, options
from tests.support.option_table import table_of

Way = Literal["near", "far"]


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = option(10, "Steps of training.", at_least=1, at_most=100)
    way: Way = option("near", "Which way.")
    share: float | None = option(None, "Share of the images. Default: all.", at_least=0, under=1, flag="--part")
    even: str = option("ab", "A word.", check=lambda name, value: value.lower())
    note: str = "no option"

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class WithInitVar:
    steps: int = option(1, "Steps of training.", at_least=1)
    twice: InitVar[bool] = False

    def __post_init__(self, twice: bool) -> None:
        check_fields(self)


def test_values_get_the_type_of_their_field() -> None:
    config = Config(share=0, even="AB")
    assert type(config.share) is float
    assert (config.steps, config.share, config.even) == (10, 0.0, "ab")
    assert replace(config, steps=3).steps == 3


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"steps": 0}, "steps=0 must be a whole number from 1 to 4294967295"),
        ({"steps": 1.0}, "steps=1.0 must be a whole number from 1"),
        ({"steps": 101}, "steps=101 must be a number at least 1 and at most 100"),
        ({"steps": None}, "steps=None must be a whole number"),
        ({"way": "up"}, "way='up' is not known; use 'near', 'far'"),
        ({"share": 1}, "share=1 must be a number at least 0 and under 1"),
        ({"share": True}, "share=True must be a number"),
        ({"share": float("nan")}, "share=nan must be a number"),
    ],
)
def test_what_is_not_allowed_is_refused_in_one_sentence(given: dict, says: str) -> None:
    with pytest.raises(LeanconvError, match=says):
        Config(**given)


def test_fields_say_what_they_are() -> None:
    steps, way, share, even = options(Config)
    assert (steps.type, steps.limits, steps.flag) == (int, "at least 1 and at most 100", None)
    assert way.limits == "near, far"
    assert (share.type, share.default, share.flag) == (float, None, "--part")
    assert even.limits == ""
    assert table_of(Config).splitlines()[2:4] == [
        "| `steps` | `10` | at least 1 and at most 100 | Steps of training. |",
        "| `way` | `near` | near, far | Which way. |",
    ]


def test_what_is_only_given_to_the_constructor_is_no_option() -> None:
    """Python 3.10 cannot evaluate its annotation."""
    assert [option.name for option in options(WithInitVar)] == ["steps"]
    assert WithInitVar(steps=3, twice=True).steps == 3
