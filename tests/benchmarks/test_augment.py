"""Images that are changed every time they are trained on."""

from __future__ import annotations

import pytest
import torch

from benchmarks.common.augment import random_views
from leanconv import LeanconvError


def test_random_views_are_parts_of_the_images() -> None:
    """A view of a picture that rises from left to right rises or, mirrored, falls, within the picture's range; a
    brighter or darker one by at most a fifth."""
    ramp = torch.linspace(1, 2, 16).expand(64, 1, 16, 16).clone()
    torch.manual_seed(0)
    seen = random_views(0.4)(ramp)
    assert seen.shape == ramp.shape
    steps = seen.diff(dim=3).sum((1, 2, 3))
    assert (steps > 0).sum() > 10
    assert (steps < 0).sum() > 10
    assert seen.min() >= 0.8 * 1 - 1e-5
    assert seen.max() <= 1.2 * 2 + 1e-5
    assert (seen.diff(dim=2).abs() < 1e-5).all()  # a row is like the one above it
    spans = seen.amax((1, 2, 3)) - seen.amin((1, 2, 3))
    assert spans.min() > 0.8 * 0.4**0.5 * 0.9  # no part has less than 0.4 of the area


@pytest.mark.parametrize("smallest", [0, 1.5, "half"])
def test_views_are_shares(smallest: object) -> None:
    with pytest.raises(LeanconvError, match="must be a share from"):
        random_views(smallest)  # type: ignore[arg-type]


def test_a_view_of_the_whole_is_a_little_brighter_or_darker() -> None:
    flat = torch.arange(8.0).reshape(8, 1, 1, 1).expand(8, 1, 4, 4).clone() + 1
    torch.manual_seed(0)
    alone = random_views(1.0)(flat)[:, 0, 0, 0] / (torch.arange(8.0) + 1)
    assert ((alone >= 0.8 - 1e-5) & (alone <= 1.2 + 1e-5)).all()
