"""What pages promise about what their blocks of code leave behind and say, beyond that they run."""

from collections.abc import Callable
from pathlib import Path

CHECKS: dict[str, Callable[[Path, list[str]], None]] = {}
"""By page: looks at the folder in which its blocks were executed, and at what each of those in bash has said."""
