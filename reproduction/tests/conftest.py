"""The fixtures of tests/, for the tests of this package, too."""

from conftest import pictures, probprompt, reproduction  # noqa: F401
