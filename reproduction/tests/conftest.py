"""Fixtures of tests/ for the tests of this package."""

from conftest import pictures, probprompt, reproduction  # noqa: F401
