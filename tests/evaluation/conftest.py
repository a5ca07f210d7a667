"""Fixtures that the tests of this room share."""

from tests.support.pictures import shards  # noqa: F401
