"""Fixtures that the tests of this room share."""

from tests.support.runs import accelerated  # noqa: F401
