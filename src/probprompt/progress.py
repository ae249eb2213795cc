"""Progress of long work; the command line draws bars from it."""

from collections.abc import Iterator
from contextlib import contextmanager


class ProgressCallback:
    """Receiver of stages, steps and messages; this one ignores them."""

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[None]:
        """Start a stage of ``total`` steps; it ends with the block."""
        yield

    @contextmanager
    def transfer(self, name: str, total: int | None, done: int = 0) -> Iterator[None]:
        """Start a transfer of ``total`` bytes, ``done`` of them finished; None if unknown."""
        yield

    def advance(self, steps: int) -> None:
        """Count steps of the stage, or bytes of the transfer."""

    def describe(self, text: str) -> None:
        """Show a short note on the stage, such as its loss or accuracy."""

    def note(self, text: str) -> None:
        """Show a message that the user should read."""


SILENT = ProgressCallback()
