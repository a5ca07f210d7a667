"""Fixtures that the tests of this room share."""

from tests.support.detection_benchmark import folder  # noqa: F401
from tests.support.small_world import template, world  # noqa: F401
