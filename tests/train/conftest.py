"""Fixtures that the tests of this room share."""

from tests.support.distilling import closed_form, distilled, many, short  # noqa: F401
