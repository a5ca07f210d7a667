"""Fixtures that the tests of this room share."""

from tests.support.reports import folder, result  # noqa: F401
