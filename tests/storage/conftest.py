"""Fixtures that the tests of this room share."""

from tests.support.comparisons import made, saved  # noqa: F401
from tests.support.reports import folder, result  # noqa: F401
